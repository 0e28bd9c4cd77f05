"""The command `python -m training.faithfulness`."""

from training.evaluation.published_controllers import main

if __name__ == "__main__":
    main()
