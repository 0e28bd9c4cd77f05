"""The command `python -m training.faithfulness_evidence`."""

from training.evaluation.measured_evidence import main

if __name__ == "__main__":
    main()
