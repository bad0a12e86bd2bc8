"""`supervise` and `python -m supervise_daemon`."""

import os


def main() -> None:
    """Entry point."""
    _open_standard_files()
    from supervise_daemon.cli.app import app

    app(prog_name="supervise")


def _open_standard_files() -> None:
    """Started with stdin, stdout or stderr closed, our pipes would get their numbers, and the job's output would go into them."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd < 3:
        os.set_inheritable(fd, True)
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


if __name__ == "__main__":
    main()
