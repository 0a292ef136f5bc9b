"""Write the data of debug_rows: a JSON Lines file with chat messages that ask when a train arrives.

.venv/bin/python scripts/make_arrivals.py [--output outputs/data/arrivals.jsonl] [--num 2000] [--seed 0]
"""

import argparse
import json
import random
from pathlib import Path

BEGINNING = '{"messages": [{"role": "user", "content": "A train leaves at'
"""How the script's own files begin; it overwrites no other."""


def rows(num: int, seed: int) -> list[dict]:
    """Returns `num` different rows with a question as messages, its answer, and the minutes as an extra column."""
    every = [(hour, minute, takes) for hour in range(6, 22) for minute in range(0, 60, 5) for takes in range(5, 60, 5)]
    return [
        {
            "messages": [
                {
                    "role": "user",
                    "content": f"A train leaves at {hour}:{minute:02d} and takes {takes} minutes. When does it arrive?",
                }
            ],
            "answer": f"{hour + (minute + takes) // 60}:{(minute + takes) % 60:02d}",
            "minutes": takes,
        }
        for hour, minute, takes in random.Random(seed).sample(every, num)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/data/arrivals.jsonl"))
    parser.add_argument("--num", type=int, default=2000, help="number of rows, at most 2,112")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not 1 <= args.num <= 2112:
        parser.error(f"--num {args.num}: expected at least 1 and at most 2,112, the different questions")
    own = args.output.is_file() and args.output.read_bytes().startswith(BEGINNING.encode())
    if args.output.exists() and not own:
        parser.error(f"--output {args.output} holds something else: expected a new file, or this script's own")
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text("".join(json.dumps(row) + "\n" for row in rows(args.num, args.seed)))
    except OSError as error:
        parser.error(f"--output {args.output} cannot be written: {error}")
    print(f"{args.num} rows in {args.output}")


if __name__ == "__main__":
    main()
