"""Questions for the real model: short and long, words, numbers, code, other languages."""

from __future__ import annotations

_NOTES = (
    "The store keeps pages in host memory and on disk. A page is written once and read many times. "
    "Every read compares a checksum, so a damaged page is a miss and never a wrong answer. "
    "When memory is short the coldest pages are written to disk first. After a restart the disk "
    "is read again and what was written there is found. "
)

PROMPTS = [
    "Name three fruits that are yellow, and say in one sentence what each of them tastes like.",
    f"{_NOTES}Summarise these notes in one sentence.",
    "What is the capital of France, and which river runs through it?",
    "Write a short poem about the sea in the evening.",
    "Explain to a child why the sky is blue.",
    "Count from one to fifteen, separated by commas.",
    "Write a Python function that returns the greatest common divisor of two numbers.",
    f"{_NOTES}{_NOTES}Which tier is asked first, and what happens to a damaged page?",
    "Translate into French: The train leaves at nine o'clock from the second platform.",
    "List the planets of the solar system in order of their distance from the sun.",
    "Two trains leave a town in opposite directions at 40 and 60 km/h. How far apart are they?",
    "Who wrote the play about Romeo and Juliet, and what is it about?",
    "Give me a recipe for pancakes with the amounts of flour, milk and eggs.",
    "Was ist der Unterschied zwischen einem Fluss und einem Bach? Antworte kurz.",
    "Complete this sentence in a funny way: My cat came home late last night because",
    f"{_NOTES}{_NOTES}{_NOTES}Write a title for these notes and give two reasons for it.",
    "What does the following code print? for i in range(3): print(i * i)",
    "Describe the colour red to someone who has never seen it.",
    "Sort these words by alphabet: pear, apple, quince, banana, orange, fig, date, grape.",
    "Why do leaves change their colour in autumn? Answer in two sentences and name the substances.",
]
