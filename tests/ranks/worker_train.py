"""The example's command lines, one after another in the same processes.

torchrun --nproc-per-node 4 tests/ranks/worker_train.py '[["--hint", "bf"], ["--hint", "bfw"]]'
"""

import json
import sys

import train_gpt


def main(lines: list[list[str]]) -> int:
    """Run each; the first exit status that is not 0, if any."""
    return next((status for words in lines if (status := train_gpt.main(words))), 0)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
