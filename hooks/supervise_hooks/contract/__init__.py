"""What the daemon and the hook library agree on: names, messages, files, exit codes.

Both sides import this package and nothing of each other. It imports the standard library,
msgspec (messages and manifests) and xxhash (digests), never torch or numpy.
"""
