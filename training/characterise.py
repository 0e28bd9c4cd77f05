"""The command `python -m training.characterise`; see `training.machine.characterisation`."""

from training.machine.characterisation import main

if __name__ == "__main__":
    main()
