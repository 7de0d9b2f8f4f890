"""Where the command `headrace` begins: Ctrl-C ends it in silence also while its modules are being imported."""

import signal


def main() -> int:
    """Run the command; its exit code."""
    # A shell that starts it in the background may have it ignore the signal.
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from headrace.server import cli

    if listens:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()
