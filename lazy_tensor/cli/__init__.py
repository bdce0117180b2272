"""The command line, `python -m lazy_tensor`.

`main` parses arguments and runs a subcommand, which has a module each. The command line uses the
package as a program does; nothing else in the package imports it.
"""
