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
    "What is the difference between weather and climate? Give one example of each.",
    "Write a haiku about a lighthouse in a storm.",
    "How many minutes are there in a week? Show the calculation step by step.",
    "Translate into German: The library is closed on Mondays, but the cafe next door is open.",
    f"{_NOTES}What is written to disk first, and why? Quote the sentence that says so.",
    "Explain what a hash table is to somebody who knows what an array is.",
    "Name five animals that live in the desert and one thing that each of them eats.",
    "Write the opening line of a detective story that is set on a train at night.",
    "What is 17 times 23? Then say whether the result is a prime number.",
    "Give three tips for a person who has to speak in public for the first time.",
    "def fibonacci(n): complete this Python function and explain how long it takes to run.",
    "Quelle est la capitale de l'Italie, et quel fleuve la traverse ? Reponds en une phrase.",
    "Describe how bread is made, from the field to the table, in four short steps.",
    "What happens to water when it freezes, and why does ice float on a lake?",
    f"{_NOTES}{_NOTES}Make a list of all the nouns in these notes, in the order they appear.",
    "Rewrite this sentence more politely: Give me the report now, you are late again.",
    "Which is heavier, a kilogram of feathers or a kilogram of iron? Explain the trap.",
    "Invent a name for a shop that sells only umbrellas, and write a slogan for it.",
    "What are the primary colours, and what do you get when you mix blue and yellow?",
    "Explain the rules of noughts and crosses to someone who has never played a game.",
    "SELECT name FROM users WHERE age > 30; Say in plain words what this query returns.",
    "Why is the sea salty? Answer as a teacher of ten-year-old children would.",
    "Write a short letter to a neighbour whose dog barks every night at three o'clock.",
    "Put these events in order: the moon landing, the fall of the Berlin wall, the first flight.",
    f"{_NOTES}Explain these notes to a child who knows what a bookshelf is.",
    "What is the opposite of each of these words: hot, early, generous, ancient, rough?",
    "Tell me about the life of a honey bee from the egg to its last flight.",
    "If today is Wednesday, which day of the week will it be in one hundred days?",
    "Cuales son los meses del ano que tienen treinta dias? Escribelos separados por comas.",
    "Summarise the story of the tortoise and the hare in two sentences and give its moral.",
]
