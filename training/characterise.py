"""The command `python -m training.characterise`; see `training.machine.characterisation`."""

import signal

if __name__ == "__main__":
    # Until something has to be undone, Ctrl-C ends it without a word, as other signals do.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from training.machine.characterisation import main

    main()
