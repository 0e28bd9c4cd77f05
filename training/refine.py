"""The command `python -m training.refine`; see `training.refinement.refining`."""

from training.refinement.refining import main

if __name__ == "__main__":
    main()
