"""Settings on the command line: flags and their help, other servers' flags, `firn config show`.

For `commands`; parameters that commands share are here, too.
"""
