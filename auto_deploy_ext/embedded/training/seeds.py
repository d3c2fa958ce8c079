"""Beginnings of what people ask and write, written for this package: the target goes on from them.

A stem is left open, so that the target finds the subject; a frame has a place for one of the subjects here.
"""

from __future__ import annotations

import random


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line for line in text.strip().split("\n") if line)


CHAT_STEMS = _lines("""
Write a
Write a short story about
Write a story in which
Write a poem about
Write a haiku about
Write a limerick about
Write a song about
Write a letter to
Write a paragraph about
Write a paragraph explaining
Write a short essay on
Write a speech for
Write a dialogue between
Write a scene where
Write a review of
Write a product description for
Write a slogan for
Write a headline for
Write a blog post about
Write a news report about
Write a diary entry of
Write a job description for
Write a cover letter for
Write a thank you note to
Write an invitation to
Write an apology to
Write an email to
Write an email asking
Write a polite email to
Write a formal email to my boss about
Write a complaint about
Write a message to a friend who
Write a toast for
Write a riddle about
Write a fairy tale about
Write a bedtime story about
Write instructions for
Write a list of
Write a Python function that
Write a Python function to
Write a Python program that
Write a Python class for
Write a Python script which
Write a JavaScript function that
Write a SQL query that
Write a shell command that
Write a C program to
Write a regular expression that matches
Write a function that takes a list and
Write a function that takes a string and
Write code that
Write three sentences about
Write two sentences about
Write the first paragraph of
Write the ending of
Compose a
Compose a short message to
Compose an email to
Draft a
Draft a reply to
Draft an email to
Create a
Create a plan for
Create a list of
Create a table of
Create a schedule for
Create a quiz about
Create a recipe with
Explain
Explain the
Explain how
Explain how to
Explain why
Explain what
Explain in simple terms
Explain in one paragraph
Explain the concept of
Explain the difference between
Explain the rules of
Explain the causes of
Explain the meaning of
Explain to a child
Explain to a five year old
Explain to a beginner
Explain step by step how
Describe
Describe the
Describe a
Describe how
Describe the process of
Describe the main features of
Describe the life of
Describe the taste of
Describe in a few sentences
Describe your ideal
What is
What is a
What is an
What is the
What is the best way to
What is the capital of
What is the difference between
What is the meaning of
What is the main idea of
What is the most common
What is the largest
What is the purpose of
What is the role of
What is the history of
What is the relationship between
What is the function of
What is the easiest way to
What is a good
What is wrong with
What are
What are the
What are some
What are some good
What are some ways to
What are the benefits of
What are the main
What are the main causes of
What are the steps to
What are the advantages of
What are the symptoms of
What are the ingredients of
What are the parts of
What are three
What are the rules of
What are the most important
What does
What does it mean to
What does it mean when
What do
What do you know about
What do you think about
What happens when
What happens if
What would happen if
What should I
What should I do if
What should I know before
What can I
What can I cook with
What can I do about
What could be the reason
What causes
What kind of
What makes
What time
What was
What was the
What were the
What year
How do I
How do I make
How do I fix
How do I get
How do I learn
How do I know if
How do I write
How do I cook
How do I clean
How do I remove
How do I choose
How do I start
How do I stop
How do I tell
How do you
How do you make
How do you say
How do people
How do birds
How do plants
How do airplanes
How do computers
How do magnets
How do I install
How do I sort
How do I read a file
How can I
How can I improve
How can I save
How can I learn
How can I become
How can I get rid of
How can I help
How can I keep
How can I make
How can I tell
How can I prepare for
How can we
How does
How does a
How does the
How does it feel to
How did
How did the
How is
How is a
How are
How long does it take to
How long should I
How many
How much
How much water
How old
How often should I
How far
How should I
Why is
Why is the
Why is it
Why is it important to
Why are
Why are there
Why do
Why do we
Why do people
Why do some
Why do cats
Why do leaves
Why does
Why does my
Why does the
Why did
Why did the
Why can't
Why should I
Why was
Who was
Who is
Who invented
Who wrote
Who discovered
When did
When was
When should I
When is the best time to
Where is
Where can I
Where do
Where does
Where did
Which
Which is better,
Which animals
Which countries
Which foods
Which of these
Which book
Which language
Can you
Can you explain
Can you explain how
Can you help me
Can you give me
Can you give me an example of
Can you recommend
Can you tell me
Can you tell me about
Can you write
Can you suggest
Could you
Could you explain
Give me
Give me a
Give me a list of
Give me a recipe for
Give me a short
Give me an example of
Give me an idea for
Give me advice on
Give me two
Give me three ideas for
Give me three reasons
Give me four
Give me five
Give me five tips for
Give me ten
Give me some tips on
Give me tips for
Give me the
Give an example of
Give three examples of
List
List the
List five
List five things
List some
List the steps
List three
List three ways to
List the main
List ten
Name
Name a
Name three
Name five
Name some famous
Tell me
Tell me a
Tell me a joke about
Tell me a story about
Tell me about
Tell me about the
Tell me how to
Tell me something about
Tell me what
Tell me why
Summarize
Summarize the
Summarize the plot of
Summarize the life of
Summarize the history of
Summarize the main points of
Summarize the following text:
Summarize in two sentences
Translate
Translate this sentence to
Translate the word
Compare
Compare the
Compare and contrast
Define
Define the term
Suggest
Suggest a name for
Suggest a
Suggest three
Suggest some
Recommend
Recommend a book
Help me
Help me understand
Help me write
Help me plan
Help me find
I
I am
I am a
I am learning
I am planning
I am trying to
I feel
I have
I have a
I have an interview
I have two
I need
I need a
I need help with
I need ideas for
I want to
I want to learn
I want to start
I would like to
I can't
I just
I forgot
I don't understand
I keep
My
My car
My cat
My dog
My computer
My phone
My friend
My plant
My neighbor
My son
My daughter
My boss
My laptop
My back
My job
My kitchen
My internet
Our
Is it
Is it safe to
Is it true that
Is it possible to
Is there
Is there a
Is a
Are there
Are
Do I need
Do you know
Do
Does
Should I
Should
Will
Would
Would it
Did
Has
Please
Please explain
Please write
Make a
Make a list of
Make up
Make a plan
Generate a
Generate a list of
Generate three
Rewrite
Rewrite this sentence:
Rewrite the following in a friendly tone:
Correct the grammar:
Fix the mistakes in this sentence:
Classify
Convert
Calculate
Calculate the
Find
Find the
Solve
Solve the equation
Design a
Plan a
Plan a trip to
Plan a week of
Imagine
Imagine you are
Imagine that
Pretend you are
Act as
You are
Think of
Complete the sentence:
Continue the story:
Finish this sentence:
Identify
Discuss
Discuss the
Outline
Outline the
Propose
Prove
Show me how to
Show me
Teach me
Use the word
In the
In one sentence,
In a few words,
In simple words,
In your own words,
If
If I
If a
If you could
For
For a
After
Before
Hello
Hi
Hello, can you
Thanks,
Good morning,
Who are you
What's
What's the
I'd like
Let's
Someone
Today
Yesterday
Every time I
There is
There are
The
A
At what
On what
To what
With
Without
Which planet
Which river
How tall
How fast
How big
How heavy
""")
"""A user turn begins with this; the target writes the rest."""

CHAT_FRAMES = _lines("""
What is {s}?
What is {s}, and why does it matter?
Explain {s}.
Explain {s} to a child.
Explain {s} in simple terms.
Explain how {s} changed over time.
Explain to a friend what {s} is.
Can you explain {s}?
Can you tell me more about {s}?
Tell me about {s}.
Tell me three facts about {s}.
Tell me a joke about {s}.
Tell me a short story about {s}.
Describe {s}.
Describe {s} in a few sentences.
Describe {s} to someone who has never seen it.
Give me three facts about {s}.
Give me five tips about {s}.
Give me four reasons to learn about {s}.
Give me an introduction to {s}.
Give me some ideas for a project about {s}.
Give me a simple definition of {s}.
List five facts about {s}.
List three questions about {s}.
List some books about {s}.
List the most important things about {s}.
Name three things that have to do with {s}.
Why is {s} important?
Why do people like {s}?
Why do people talk about {s}?
How does {s} work?
How do I learn more about {s}?
How do I get started with {s}?
How can I teach children about {s}?
How would you describe {s}?
How do I write about {s}?
What are the benefits of {s}?
What are the main problems with {s}?
What are some interesting facts about {s}?
What are common mistakes with {s}?
What do I need to know about {s}?
What should I read about {s}?
What does {s} mean to people?
What is the history of {s}?
What is the best thing about {s}?
What is the difference between {s} and {t}?
What do {s} and {t} have in common?
Compare {s} and {t}.
Which is more interesting, {s} or {t}?
Is {s} better than {t}?
How is {s} related to {t}?
Write a poem about {s}.
Write a short poem about {s}.
Write a poem about {s} and {t}.
Write a haiku about {s}.
Write a story about {s}.
Write a short story about {s} and {t}.
Write a funny story about {s}.
Write a song about {s}.
Write a paragraph about {s}.
Write a short essay about {s}.
Write two sentences about {s}.
Write a blog post about {s}.
Write a speech about {s}.
Write a slogan about {s}.
Write a letter to a friend about {s}.
Write an email to a colleague about {s}.
Write a polite email to a teacher about {s}.
Write an email to my neighbor about {s}.
Write a message to my sister about {s}.
Write a dialogue about {s}.
Write a riddle about {s}.
Write a quiz about {s}.
Compose an email to a shop about {s}.
Summarize {s}.
Summarize {s} in three sentences.
Summarize what is known about {s}.
Summarize the history of {s} in a few sentences.
Create a lesson plan about {s}.
Create a short guide to {s}.
Make a list of words about {s}.
Make a plan for a weekend about {s}.
Suggest a title for a book about {s}.
Suggest three activities about {s}.
Help me understand {s}.
I want to learn about {s}. Where do I begin?
I have to give a talk about {s}. What should I say?
I am interested in {s}. What do you recommend?
I do not understand {s}. Can you help me?
My friend keeps talking about {s}. What should I know?
My class is about {s}. Give me an overview.
My daughter asked me about {s}. What do I tell her?
Who is an expert on {s}?
When did people start to care about {s}?
Where can I see {s}?
Do you like {s}?
Is {s} difficult?
Are there any myths about {s}?
Imagine a world without {s}.
In one sentence, what is {s}?
Define {s}.
Discuss {s}.
""")
"""A whole user turn, with one subject or two."""

CODE_FRAMES = _lines("""
Write a Python function that {c}.
Write a Python function that {c} and explain it.
Write a function that {c}.
Write a short Python program that {c}.
Write a JavaScript function that {c}.
Write Python code that {c}, with comments.
How do I write a function that {c}?
How can I write code that {c} in Python?
Create a Python function that {c}.
Show me a Python function that {c}.
Explain how to write a function that {c}.
Can you write a Python function that {c}?
""")
CODE_TASKS = _lines("""
reverses a string
counts the words in a text
adds two numbers
checks whether a number is prime
sorts a list of names
finds the average of a list
removes duplicates from a list
converts Celsius to Fahrenheit
prints the numbers from 1 to 100
reads a file line by line
merges two dictionaries
counts the vowels in a word
checks whether a word is a palindrome
computes the factorial of a number
finds the longest word in a sentence
sums the digits of a number
returns the second smallest element
swaps two variables
splits a list into two halves
generates a random password
capitalizes every word
finds the common elements of two lists
computes the area of a circle
checks whether a year is a leap year
multiplies two matrices
rounds a number to two decimals
flattens a nested list
searches a sorted list
draws a triangle of stars
turns a list into a string
counts how often each letter occurs
returns the odd numbers of a list
filters out negative numbers
calculates the distance between two points
validates an email address
rolls two dice
simulates a coin toss
finds the maximum of three numbers
rotates a list by one place
downloads a web page
""")
SUBJECTS = _lines("""
gravity
electricity
magnetism
evolution
the water cycle
the heart
the human brain
the immune system
blood pressure
vitamins
protein
the skeleton
bacteria
viruses
vaccines
DNA
cells
atoms
chemical reactions
acids
the periodic table
light
sound
color
rainbows
thunderstorms
tornadoes
hurricanes
earthquakes
volcanoes
mountains
deserts
glaciers
oceans
tides
coral reefs
rain forests
islands
caves
fossils
dinosaurs
mammals
whales
dolphins
sharks
elephants
wolves
bears
foxes
owls
penguins
butterflies
bees
ants
spiders
snakes
frogs
horses
cats
dogs
rabbits
trees
mushrooms
roses
cacti
seeds
soil
gardening
farming
wheat
rice
corn
potatoes
apples
bananas
oranges
coffee
tea
chocolate
cheese
bread
pancakes
pasta
soup
salad
vegetable curry
apple pie
fried rice
chicken soup
cooking
baking
breakfast
a healthy diet
fasting
exercise
running
swimming
yoga
meditation
stress
anxiety
happiness
friendship
love
kindness
courage
patience
honesty
trust
teamwork
leadership
creativity
curiosity
motivation
time management
good habits
memory
learning
studying
homework
reading
writing
poetry
novels
fairy tales
Greek mythology
Shakespeare
Hamlet
Sherlock Holmes
Robin Hood
Cinderella
Treasure Island
Moby Dick
painting
sculpture
photography
architecture
bridges
castles
pyramids
museums
theater
movies
cartoons
music
jazz
opera
the violin
drums
singing
dancing
chess
football
basketball
tennis
hiking
camping
fishing
sailing
traveling
airplanes
trains
cars
electric cars
ships
submarines
rockets
satellites
space travel
black holes
stars
galaxies
comets
the sun
Mars
telescopes
microscopes
clocks
calendars
maps
the compass
money
banks
taxes
inflation
savings
the stock market
insurance
advertising
small businesses
job interviews
remote work
meetings
a new job
a job application
a late delivery
a broken washing machine
a lost package
a noisy party
a birthday party
a wedding
a holiday by the sea
a visit to the dentist
a first day at school
moving to a new city
saving energy
solar power
wind power
nuclear power
batteries
recycling
plastic
clean water
air pollution
global warming
the ozone layer
computers
the internet
email
passwords
search engines
operating systems
programming
Python
recursion
sorting algorithms
linked lists
hash tables
binary search
version control
machine learning
neural networks
robots
cloud computing
encryption
open source software
video games
social media
smartphones
mathematics
algebra
geometry
fractions
prime numbers
probability
statistics
calculus
logic
philosophy
ethics
psychology
sociology
economics
democracy
elections
laws
human rights
the United Nations
the Roman Empire
ancient Egypt
ancient Greece
the Middle Ages
the Renaissance
the Industrial Revolution
the French Revolution
the American Civil War
the Second World War
the Silk Road
the Vikings
the printing press
the steam engine
the telephone
penicillin
Albert Einstein
Marie Curie
Leonardo da Vinci
Isaac Newton
Charles Darwin
Napoleon
Cleopatra
Japan
Brazil
Canada
India
Italy
Kenya
Australia
Mexico
Paris
London
New York
Antarctica
the Amazon
the Nile
the Sahara
the Alps
snow
autumn
spring
the night sky
a garden
an old house
a lonely robot
a brave mouse
a small village
a forgotten key
a rainy day
a train journey
a grandmother's kitchen
an empty street
a talking tree
a lost dog
""")
"""Fills the frames."""

PLAIN_FRAMES = _lines("""
{S} is
{S} can be
{S} has been
The history of {s} begins
The history of {s}
The most important thing about {s} is
One of the most interesting facts about {s} is
The study of {s}
An introduction to {s}\\n\\n
A short guide to {s}\\n\\n
# {S}\\n\\n
## {S}\\n
{S}: an overview\\n
Most people know {s} as
Many people think that {s}
When people think of {s}, they
For a long time, {s}
In recent years, {s}
According to scientists, {s}
There are many reasons why {s}
What we know about {s}
Three things to know about {s}:\\n1.
Questions about {s}:\\n- What
Everything she knew about {s} came from
He had never thought much about {s} until
On the day that she first heard of {s},
The teacher asked the class about {s}, and
Question: What is {s}?\\nAnswer:
The word for {s} comes from
The relationship between {s} and {t} is
Unlike {t}, {s}
Both {s} and {t} are
{S} and {t} are
The role of {s} in modern life
In this chapter we look at {s},
In this article, we will explore {s}
The main advantage of {s} is
The main problem with {s} is
{S} plays an important role in
The development of {s} led to
""")
"""Plain text begins with this; {S} is the subject with a capital."""

PLAIN_STEMS = _lines("""
The old man sat by the window and
The small town lies between two hills, where
The train arrived late, and
The house at the end of the road
The children ran down to the river, where
The king had three daughters, and
The market opens at six, when
The library was quiet until
The ship left the port in the early morning, and
The forest behind the village
The first snow of the year fell on
The dog waited at the door until
The farmer looked at the sky and
The door was locked, but
The letter arrived on a Monday. It
The road to the mountain village is
The baker gets up at three, when
The island has no roads, so
Once upon a time, there was a
Once there was a girl who
Once there was a king who
Once there lived a poor tailor who
Once, in a village by the sea,
Long ago, before there were any roads,
In a small house near the forest lived
There was once a teacher who
There once was a young fox who
A long time ago, a
A young woman walked into
A man and his son were
Every evening, the old sailor
Every morning before breakfast, Anna
Every year in spring, the people of
One day, a
One night, when everybody was asleep,
Late at night, the
Early one morning, Peter
When the rain stopped, the
When Maria opened the box, she
When the bell rang, the pupils
As soon as the sun went down,
After the war, the family
After many years, the old friends
Before he left, the doctor
It was a cold day in
It was the last day of summer, and
It was already dark when
She had never seen
She opened the letter and
She put the book on the table and
He looked at the map and
He had always wanted to
They walked for hours until
They had been friends since
Nobody in the village knew why
Nobody had seen the
My grandfather used to
My first day at work
My favorite season is
I remember the day when
I grew up in a
I have always loved
We lived in a small
We had been driving for
Tom and Lily were
Lucy had a little
The human body is made of
The heart is a muscle that
The brain is the organ that
The lungs are
The skin is
The Earth moves around the sun
The sun is a star that
The speed of light is
The atmosphere of the Earth
The ocean covers
The largest animal on Earth is
The fastest land animal is
The tallest mountain in the world is
The longest river in the world is
The smallest country in the world is
The capital of France is
The capital city of
The population of
The official language of
The national animal of
The president of
The currency of
The days of the week are
The four seasons are
The primary colors are
The three branches of government are
The five senses are
The Great Wall of China
The Eiffel Tower was
The Roman Empire was
The Second World War began
The Industrial Revolution was a period
The French Revolution
The Renaissance was
The Declaration of Independence
The United States of America
The printing press was invented
The telephone was invented by
The theory of evolution
The law of gravity
The theory of relativity
The periodic table is
The water cycle describes
The food chain
Evaporation is the process by which
Digestion is the process by which
Respiration is the process in which
Evolution is the process of
Democracy is a form of government in which
Inflation is
Gravity is the force that
Friction is a force that
Energy is the ability to
An atom is the smallest
A molecule is
A cell is the basic unit of
An ecosystem is a community of
A volcano is an opening in
An earthquake is
A glacier is
A desert is a place where
A mammal is an animal that
A reptile is
A noun is a word that
A verb is
A metaphor is a figure of speech that
A triangle is a shape with
A prime number is a number that
A fraction is
A function is
An algorithm is a set of
A computer program is
A variable is a name for
A linked list is a data structure in which
A stack is a data structure that
A hash table is
A compiler is a program that
An operating system is software that
A web browser is
A neural network is
A router is a device that
A battery is a device that
A microscope is an instrument that
A budget is a plan for
A contract is an agreement
A vaccine is
A balanced diet
A good teacher
A good night
Plants need
Birds can fly because
Trees lose their leaves
Bees are important because
Water boils at
Ice is
Metals are
Light travels
Sound travels
Volcanoes are formed when
Clouds are made of
Mountains are formed by
Forests cover
Bridges are built to
Cities grow when
Languages change
Computers store
In 1492, Christopher Columbus
In 1776, the
In 1815, Napoleon
In 1912, the
In 1945, the
In 1989, the Berlin Wall
In 2008, the
In the eighteenth century, the
In the nineteenth century, many
In the early twentieth century,
In the Middle Ages, people
In ancient Egypt, the
In ancient Rome,
In the summer of
In mathematics, a
In physics, the
In chemistry, an
In biology, the term
In computer science, a
In economics, the
In music, a
In many countries,
In most cases,
In order to succeed,
In conclusion,
During the winter, the
During the first week,
Although it was
Because of the storm,
If you want to learn
If you have ever
If the temperature falls
To make a cup of tea,
To solve this problem, we
To change a tire,
To become a good writer,
The best way to learn a language is
The best way to save money is
The key to a good friendship is
The secret of a good soup is
The first step in solving a problem is
The most important meal of the day is
The most popular sport in the world is
The purpose of this report is
The aim of this study was
The results show that
The following example shows
The table below shows
This book is about
This chapter describes
This paper presents
This recipe makes
This guide will help you
There are three kinds of
There are two main types of
There are several ways to
There are many different
Learning to cook is
Learning a new language
Reading is important because
Regular exercise helps
Sleep is
Too much sugar
Drinking enough water
Many people believe that
Many scientists think that
Some animals
Some people prefer
Most plants
Most birds
Scientists have discovered
Researchers at the university
Doctors recommend
Teachers often
Parents should
Students who
Workers in
Dear Sir or Madam,
Dear Anna,
Dear Mr. Brown,
Dear team,
Hello everyone,
Subject: Meeting on
Thank you for your
I am writing to
We are pleased to
We are looking for
Question: How many
Question: Why do
Q: What is the
Title: The
Chapter 1\\n\\n
Abstract\\n\\n
Introduction\\n\\n
Summary:
Conclusion\\n\\n
Definition:
Example 1:
Step 1:
Instructions:\\n1.
Directions:\\n1. Preheat the oven
Method:\\n1.
Shopping list:\\n- milk\\n-
Ingredients:\\n- 3 eggs\\n-
Ingredients:\\n- 1 pound of
Ingredients:\\n* 1 cup of
Ingredients\\n\\n1 onion
You will need:\\n-
Materials:\\n-
Tools:\\n-
To do:\\n-
Packing list:\\n-
Things to remember:\\n-
Advantages:\\n-
Pros:\\n-
Tips for students:\\n1.
Rules of the game:\\n1.
Monday:
The colors of the rainbow are red,
One, two, three,
A, B, C,
1, 2, 4, 8,
2 + 2 = 4\\n3 + 3 =
Let x be
Let n be an integer. Then
Suppose that
Proof.
Theorem 1.
""")
"""Plain text begins with this."""

CODE_STEMS = (
    'def add(a, b):\n    """',
    'def is_prime(n):\n    """Return',
    'def factorial(n):\n    """Return the',
    "def mean(",
    'def reverse_string(s):\n    """',
    'def count_words(text):\n    """Count',
    "def read_file(path):\n",
    "def main():\n",
    'def gcd(a, b):\n    """Return the greatest',
    'def binary_search(items, target):\n    """',
    "def bubble_sort(",
    'def merge_sort(items):\n    """',
    "def is_palindrome(word):\n",
    'def square(x):\n    """Return the',
    "def test_",
    "def celsius_to_fahrenheit(c):\n",
    'def find_max(numbers):\n    """Find',
    "def flatten(",
    "def remove_duplicates(",
    "def power(base, exponent):\n",
    'def sum_digits(n):\n    """Return the sum',
    "def greet(name):\n",
    "def area(",
    "class Stack:\n    def __init__(self):\n",
    "class Dog:\n",
    "class Point:\n    def __init__(self, x, y):\n",
    "class Account:\n",
    "class Queue:\n    ",
    "class Node:\n    def __init__(self",
    "import random\n\n",
    "import math\n\n",
    "import os\nimport sys\n",
    "import json\n\n",
    "import numpy as np\n\n",
    "import pandas as pd\n\n",
    "from datetime",
    "# Print the numbers from 1 to 10\nfor i in",
    "# Read a file\nwith open(",
    "for i in range(10):\n",
    "while True:\n",
    "numbers = [1, 2, 3, 4, 5]\n",
    "names = [",
    "x = int(input(",
    'if __name__ == "__main__":\n',
    "print(",
    "try:\n",
    "function add(a, b) {\n",
    "function isEven(n) {\n",
    "const numbers = [",
    "let total = 0;\nfor (",
    "public class",
    "public static void main(String[] args) {\n",
    "#include <stdio.h>\n\nint main() {\n",
    "int sum(int a, int b) {\n",
    "#include <iostream>\n",
    "SELECT name, age FROM",
    "SELECT COUNT(*) FROM",
    "CREATE TABLE users (\n",
    "<html>\n<head>\n",
    "<ul>\n  <li>",
    "```python\n",
    "```python\ndef ",
    "$ git",
    "#!/bin/bash\n",
    '{\n  "name":',
    "name,age,city\n",
    "fn main() {\n",
    'def largest(values):\n    """Return the',
    'def vowels(text):\n    """Count the',
    'def transpose(matrix):\n    """',
    'def word_lengths(words):\n    """Return a dictionary',
    'def clamp(value, low, high):\n    """',
    "def median(values):\n",
)
"""Code begins with this."""


def _fill(frame: str, generator: random.Random) -> str:
    subject, other = generator.sample(SUBJECTS, 2)
    task = generator.choice(CODE_TASKS)
    capital = subject[0].upper() + subject[1:]
    return frame.replace("\\n", "\n").format(s=subject, t=other, S=capital, c=task)


def chat_stem(generator: random.Random) -> str:
    """The first words of a user turn."""
    return generator.choice(CHAT_STEMS)


def chat_turn(generator: random.Random) -> str:
    """A whole user turn."""
    return _fill(generator.choice(CODE_FRAMES if generator.random() < 0.08 else CHAT_FRAMES), generator)


def plain_start(generator: random.Random) -> str:
    """The first words of a plain text."""
    draw = generator.random()
    if draw < 0.15:
        return generator.choice(CODE_STEMS)
    if draw < 0.6:
        return _fill(generator.choice(PLAIN_STEMS), generator)
    return _fill(generator.choice(PLAIN_FRAMES), generator)
