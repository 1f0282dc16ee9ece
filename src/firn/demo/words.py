"""The vocabulary of the invented world: word parts, attributes, value forms and phrasings.

Data for `facts`, nothing else.
"""

# ruff: noqa: SIM905 (a split string reads better than sixty quoted syllables)

from __future__ import annotations

from random import Random

# --- names: start + sometimes a middle + an end of the right kind ------------------------------

STARTS = tuple(
    "Bal Ber Bran Cal Cas Cor Dal Del Dor El Fal Fen Fer Gal Gar Hal Har Hol Is Jas Jor Kal Kel "
    "Kor Lan Lor Lun Mal Mar Mel Mor Nal Nor Ol Or Pal Per Ral Ren Ros Sal Sel Sor Tal Tar Tav "
    "Tor Ul Val Var Vel Ver Wal Wen Wil Yar Yor Zan Zel Zor".split()
)
MIDDLES = tuple("ba be da de do la le lo ma me mi na ne ni ra re ri ro sa se ta te va vi".split())
FIRST_ENDS = tuple("da la lin mar mir na nel ra ren ric ris sa ta tan tha vin wen".split())
LAST_ENDS = tuple(
    "berg by dahl dane dik don fell gard ham ler man mer nik quist sen ski son ster tik ver well "
    "wood".split()
)
PLACE_ENDS = tuple(
    "bay bridge burg bury cliff dale field ford gate haven holm hurst mere moor mouth port stead "
    "ton vale ville wick".split()
)
BRAND_ENDS = tuple("dex dor fix lex lon lux max nex nix nor ron rix tek thon tron vex vix".split())
WORD_ENDS = {"place": PLACE_ENDS, "brand": BRAND_ENDS}
GOODS = tuple(
    "bench blanket bottle camera carpet chair clock desk drill engine heater kettle knife ladder "
    "lamp lantern mirror printer pump radio scale shelf stove table tent watch".split()
)

# --- attributes: category -> attribute -> form of the value ------------------------------------

CATEGORIES = ("person", "product", "place", "server", "project")
CATEGORY_WEIGHTS = (40, 20, 15, 15, 10)

_FORMS_BY_CATEGORY: dict[str, dict[str, str]] = {
    "person": {
        "door code": "#####",
        "badge number": "######",
        "locker number": "####",
        "phone extension": "#####",
        "birthday": "date",
        "home town": "place",
        "account number": "@@-####",
        "hourly rate": "##.## euros",
    },
    "product": {
        "price": "###.## euros",
        "order code": "@@-####",
        "weight": "#### grams",
        "delivery date": "date",
        "serial number": "######",
        "supplier": "brand",
    },
    "place": {
        "population": "##,###",
        "mayor": "person",
        "postal code": "#####",
        "market day": "date",
        "altitude": "#### metres",
    },
    "server": {
        "port": "#####",
        "access key": "@@@-###",
        "timeout": "#### seconds",
        "administrator": "person",
        "last backup": "date",
        "memory limit": "##### megabytes",
    },
    "project": {
        "budget": "##,### euros",
        "deadline": "date",
        "leader": "person",
        "version": "#.##.##",
        "ticket number": "#####",
        "test site": "place",
    },
}
ATTRIBUTES = {category: tuple(forms) for category, forms in _FORMS_BY_CATEGORY.items()}
FORMS = {a: form for forms in _FORMS_BY_CATEGORY.values() for a, form in forms.items()}
"""What a value of the attribute looks like: a kind of name, "date", or a pattern with a unit.
In patterns, # is a digit (the first is not zero) and @ a capital letter."""

_MONTHS = (
    "January February March April May June July August September October November December"
).split()
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"  # I and O read like digits


def fill(pattern: str, dice: Random) -> str:
    """One random value of a pattern (without its unit), or one random date."""
    if pattern == "date":
        return f"{dice.randint(1, 28)} {dice.choice(_MONTHS)} {dice.randint(1950, 2049)}"
    text: list[str] = []
    low = 1
    for mark in pattern:
        if mark == "#":
            text.append(str(dice.randint(low, 9)))
            low = 0
        else:
            text.append(dice.choice(_LETTERS) if mark == "@" else mark)
    return "".join(text)


# --- what is said: {a} attribute, {e} entity, {v} value ----------------------------------------

STATEMENTS = (
    "The {a} of {e} is {v}.",
    "The {a} of {e} is {v}.",
    "The {a} of {e} is {v}.",
    "For {e}, the {a} is {v}.",
    "As for {e}, the {a} is {v}.",
    "We noted that the {a} of {e} is {v}.",
    "According to the files, {e} has the {a} {v}.",
    "{e} has the {a} {v}.",
)
RECORD = "{e}: {a} {v}"
QUESTIONS = (
    "What is the {a} of {e}?",
    "What is the {a} of {e}?",
    "Tell me the {a} of {e}.",
    "Can you give me the {a} of {e}?",
    "I need the {a} of {e}, please.",
    "What {a} does {e} have?",
    "Do you know the {a} of {e}?",
    "{e}: what is the {a}?",
)
NOT_MENTIONED = "not mentioned"
NOTES = (
    "Please note: the {a} of {e} is {v}.",
    "One more thing: the {a} of {e} is {v}.",
)
NOTED = "Noted."
MY_NAME = "My name is {}."
WELCOME = "Nice to meet you, {}."
WHO_AM_I = ("What is my name?", "Who am I?")
YOUR_NAME = "Your name is {}."
REPEAT = ("Please repeat that.", "Say that again, please.")
ASKED = ("What did I just ask?", "What was my last question?")
YOU_SAID = "You asked: {}"
READ = "I have read it."
GREETINGS = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi there!", "Hello! How can I help you?"),
    ("Good morning!", "Good morning! How can I help you?"),
    ("Thank you!", "You are welcome."),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("Goodbye!", "Goodbye!"),
)
SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer from the document.",
    "You are a careful librarian. Answer only what the document says.",
    "Answer every question from the notes below. Say when something is not mentioned.",
    "You work at the front desk. Use the records you are given.",
    "Read the text and answer the questions about it.",
)
FILLER = (
    "The meeting was long and the coffee was cold.",
    "Nobody remembers who opened the window.",
    "It rained for most of the week.",
    "The list was checked twice.",
    "Some of these entries are new.",
    "The old building will be painted in spring.",
    "A few people asked for a larger table.",
    "The lights in the corridor work again.",
    "There was a short break before lunch.",
    "The next report will follow soon.",
    "Everything else stays as it was.",
    "The train was late, as usual.",
    "Somebody left an umbrella near the door.",
    "The garden looks better than last year.",
    "All numbers were read aloud.",
    "The archive is closed on Sundays.",
)
