"""What `stepahead bench spec` asks: answers that say again what the prompt has said."""

from __future__ import annotations

_NEWS = (
    "The harbour of Eastmouth will be closed to large ships for eleven weeks from the third of "
    "March, the port authority said on Monday. The lock gates, built in 1931, have to be replaced "
    "because rust was found in four of the eight hinges. Ferries to the islands will sail from the "
    "old fish quay, and buses will carry passengers from the railway station every twenty minutes. "
    "The work will cost nineteen million pounds, of which the county pays a third. Fishing boats "
    "are not affected. Shops near the lock have been promised compensation, and their owners can "
    "apply until the end of May. A public meeting will be held in the town hall on Thursday evening"
)
_MINUTES = (
    "Minutes of the garden club, 9 October. Present: Ana, Bram, Chidi, Dora, Emre. The apple "
    "trees gave 240 kilos this year, twice as many as last year. The greenhouse roof leaks above "
    "the tomato beds; Bram will ask two builders for a price before the end of the month. The "
    "water barrels are to be emptied before the first frost, by Dora and Emre. Chidi proposed a "
    "seed swap in spring, and all agreed; the date will be set at the next meeting. Money: 312 "
    "in the box, 85 spent on compost, 40 on a new spade. The next meeting is on 13 November at "
    "Ana's house"
)
_CLASS = '''class Account:
    """Money of one customer, in cents."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        if amount > self.balance:
            raise ValueError("there is not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))
'''
_SCRIPT = """def read_rows(path):
    rows = []
    with open(path) as lines:
        for line in lines:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, value = line.split("=")
            rows.append((name.strip(), float(value)))
    return rows


def mean_of(rows):
    total = 0.0
    for name, value in rows:
        total += value
    return total / len(rows)
"""

# by workload: one user message for each prompt
SPEC_PROMPTS: dict[str, tuple[str, ...]] = {
    "summarise": (
        f"Summarize this text in its own words, sentence by sentence:\n\n{_NEWS}.",
        f"Summarize this text in its own words, sentence by sentence:\n\n{_MINUTES}.",
    ),
    "edit code": (
        f"Rename `amount` to `cents` in this code and print all of it:\n\n{_CLASS}",
        f"Rename `rows` to `pairs` in this code and print all of it:\n\n{_SCRIPT}",
    ),
}
