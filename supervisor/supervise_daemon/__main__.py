"""`supervise` and `python -m supervise_daemon`."""



def main() -> None:
    """Entry point."""
    from supervise_daemon.cli.app import app

    app(prog_name="supervise")


if __name__ == "__main__":
    main()
