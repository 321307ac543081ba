"""Thirty-two chat prompts of mixed lengths, for the demo."""

from __future__ import annotations

_NOTE = (
    "The old lighthouse stood at the end of a narrow spit of land. Every evening at dusk the "
    "keeper climbed one hundred and forty-two steps, trimmed the wick, polished the lens and wrote "
    "the weather into a large book with a green cover. In forty years he missed a single night, "
    "when a storm tore the door from its hinges and flooded the lower rooms. "
)
_LETTER = (
    "Dear team, thank you for the work on the harbour project. The cranes arrived on Monday, two "
    "days early, and the concrete for the second pier has been poured. We still wait for the "
    "permit of the northern road, without which the heavy trucks must take the long way round. "
    "Please send me your plans for next month by Friday noon, and tell me who will be on leave. "
)

DEMO_PROMPTS: tuple[str, ...] = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three animals that sleep in winter.",
    "Explain in two sentences why the sky is blue.",
    "Give me a short recipe for pancakes.",
    "What is 12 times 11?",
    "Translate 'good morning' into Spanish and German.",
    "Write a haiku about autumn.",
    "Who wrote the play Hamlet?",
    "List the first five prime numbers.",
    "What does a compiler do? Answer a ten-year-old.",
    "Give two reasons to learn a second language.",
    "Describe a sunrise without using the word sun.",
    "What is the boiling point of water at sea level?",
    "Suggest a name for a small bakery.",
    "Write a polite e-mail that declines an invitation to a dinner.",
    f"Summarise this text in one sentence: {_NOTE}",
    f"How many steps did the keeper climb? {_NOTE}",
    f"Rewrite this text in the present tense: {_NOTE}",
    f"Give this text a title: {_NOTE}",
    f"What does the writer of this letter ask for? {_LETTER}",
    f"Answer this letter in three sentences: {_LETTER}",
    f"List the facts in this letter: {_LETTER}",
    f"What is late, according to this letter? {_LETTER}",
    f"Compare the two texts. First: {_NOTE} Second: {_LETTER}",
    f"Which text is older, and why do you think so? First: {_NOTE} Second: {_LETTER}",
    f"Write a story that has both in it. First: {_NOTE} Second: {_LETTER}",
    f"Continue this text: {_NOTE}{_NOTE}",
    "You plan a walk of three days in the mountains. Write down what to take with you.",
    "Explain the difference between weather and climate to a friend.",
    "A train leaves at 9:40 and arrives at 12:05. How long does the journey take?",
    "Write four lines about a cat that is afraid of the moon.",
)
