"""Short sentences in four languages, and prompts that ask for one of them in another.

Sentences and translations are headlab's own. Examples in a prompt are of mixed languages, so that only the last tag
says which is wanted: the wrong tag or the wrong sentence can then be put in by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from headlab.arguments import count, seed_number
from headlab.errors import PromptError
from headlab.text import shown

#: Languages that are translated into; the source is English.
TargetLanguage = Literal["French", "Spanish", "German"]
LANGUAGES: tuple[TargetLanguage, ...] = get_args(TargetLanguage)

#: English, French, Spanish and German.
SENTENCES: tuple[tuple[str, str, str, str], ...] = (
    ("The cat is black.", "Le chat est noir.", "El gato es negro.", "Die Katze ist schwarz."),
    ("I drink water.", "Je bois de l'eau.", "Bebo agua.", "Ich trinke Wasser."),
    ("The house is big.", "La maison est grande.", "La casa es grande.", "Das Haus ist groß."),
    ("She has a dog.", "Elle a un chien.", "Ella tiene un perro.", "Sie hat einen Hund."),
    ("We live in Paris.", "Nous vivons à Paris.", "Vivimos en París.", "Wir leben in Paris."),
    ("The book is on the table.", "Le livre est sur la table.", "El libro está sobre la mesa.",
     "Das Buch liegt auf dem Tisch."),
    ("My brother is a doctor.", "Mon frère est médecin.", "Mi hermano es médico.", "Mein Bruder ist Arzt."),
    ("The sun is hot.", "Le soleil est chaud.", "El sol es caliente.", "Die Sonne ist heiß."),
    ("I love music.", "J'aime la musique.", "Me gusta la música.", "Ich liebe Musik."),
    ("The children are playing.", "Les enfants jouent.", "Los niños juegan.", "Die Kinder spielen."),
    ("It is cold today.", "Il fait froid aujourd'hui.", "Hoy hace frío.", "Heute ist es kalt."),
    ("He works at night.", "Il travaille la nuit.", "Él trabaja de noche.", "Er arbeitet nachts."),
    ("The door is open.", "La porte est ouverte.", "La puerta está abierta.", "Die Tür ist offen."),
    ("Where is the station?", "Où est la gare ?", "¿Dónde está la estación?", "Wo ist der Bahnhof?"),
    ("The king is old.", "Le roi est vieux.", "El rey es viejo.", "Der König ist alt."),
    ("I have two sisters.", "J'ai deux sœurs.", "Tengo dos hermanas.", "Ich habe zwei Schwestern."),
    ("The bread is good.", "Le pain est bon.", "El pan es bueno.", "Das Brot ist gut."),
    ("She writes a letter.", "Elle écrit une lettre.", "Ella escribe una carta.", "Sie schreibt einen Brief."),
    ("The city is beautiful.", "La ville est belle.", "La ciudad es hermosa.", "Die Stadt ist schön."),
    ("They sing a song.", "Ils chantent une chanson.", "Ellos cantan una canción.", "Sie singen ein Lied."),
    ("My mother is here.", "Ma mère est ici.", "Mi madre está aquí.", "Meine Mutter ist hier."),
    ("The river is long.", "La rivière est longue.", "El río es largo.", "Der Fluss ist lang."),
    ("Winter is coming.", "L'hiver arrive.", "El invierno llega.", "Der Winter kommt."),
    ("The horse runs fast.", "Le cheval court vite.", "El caballo corre rápido.", "Das Pferd läuft schnell."),
    ("I read the newspaper.", "Je lis le journal.", "Leo el periódico.", "Ich lese die Zeitung."),
    ("The school is closed.", "L'école est fermée.", "La escuela está cerrada.", "Die Schule ist geschlossen."),
    ("He speaks with the teacher.", "Il parle avec le professeur.", "Él habla con el profesor.",
     "Er spricht mit dem Lehrer."),
    ("The moon is white.", "La lune est blanche.", "La luna es blanca.", "Der Mond ist weiß."),
    ("We eat an apple.", "Nous mangeons une pomme.", "Comemos una manzana.", "Wir essen einen Apfel."),
    ("The train is late.", "Le train est en retard.", "El tren llega tarde.", "Der Zug hat Verspätung."),
    ("The sky is blue.", "Le ciel est bleu.", "El cielo es azul.", "Der Himmel ist blau."),
    ("My friend lives in London.", "Mon ami habite à Londres.", "Mi amigo vive en Londres.",
     "Mein Freund wohnt in London."),
)  # fmt: skip


@dataclass(frozen=True)
class Translation:
    """A prompt that asks for a sentence in another language, and its like with one thing changed.

    Attributes:
        prompt: Examples in mixed languages, the sentence, and the language's tag.
        other_language: The same with the tag of another language.
        other_sentence: The same with another sentence in the place of the one to be translated.
        bare: The sentence alone, without examples or tags.
        answer: The translation, with its leading space.
        same_meaning: The sentence in the language of the other tag, with its leading space.
        same_language: The other sentence in the right language, with its leading space.
        language: The language asked for.
    """

    prompt: str
    other_language: str
    other_sentence: str
    bare: str
    answer: str
    same_meaning: str
    same_language: str
    language: str


def translations(
    n: int,
    *,
    language: TargetLanguage | None = None,
    n_shots: int = 3,
    half: Literal["first", "second", "both"] = "both",
    seed: int = 0,
) -> tuple[Translation, ...]:
    """Prompts about sentences drawn at random, each asked about once before any is asked again.

    Args:
        n: How many.
        language: The language asked for; None takes all in turn.
        n_shots: Examples of each prompt, their languages in turn from a random one on.
        half: Sentences to draw from, examples and others included: what is learned on one half can be measured on the
            other.
        seed: Seed of everything drawn.

    Raises:
        PromptError: There is no such language or half, or too few sentences.
    """
    count(n, "n")
    if language is not None and language not in LANGUAGES:
        raise PromptError(f"language={shown(language)} must be one of {', '.join(LANGUAGES)}")
    middle = len(SENTENCES) // 2
    halves = {"first": SENTENCES[:middle], "second": SENTENCES[middle:], "both": SENTENCES}
    if half not in halves:
        raise PromptError(f"half={shown(half)} must be one of {', '.join(halves)}")
    sentences = halves[half]
    if count(n_shots, "n_shots", least=0) > len(sentences) - 2:
        raise PromptError(
            f"{n_shots} examples cannot be drawn from {len(sentences)} sentences, of which two are asked about"
        )
    rng = np.random.default_rng(seed_number(seed))
    order = np.concatenate(
        [rng.permutation(len(sentences)) for _ in range(-(-n // len(sentences)))]
    )
    made = []
    for number, at in enumerate(order[:n]):
        asked = language or LANGUAGES[number % len(LANGUAGES)]
        others = [sentences[place] for place in rng.permutation(len(sentences)) if place != at]
        made.append(_translation(sentences[at], others, asked, n_shots, rng))
    return tuple(made)


def _translation(
    sentence: tuple[str, str, str, str],
    others: list[tuple[str, str, str, str]],
    language: TargetLanguage,
    n_shots: int,
    rng: np.random.Generator,
) -> Translation:
    other = others[0]
    first = int(rng.integers(len(LANGUAGES)))
    languages = [LANGUAGES[(first + at) % len(LANGUAGES)] for at in range(n_shots)]
    shots = "".join(
        f"{_question(shot[0], tag)} {_in(shot, tag)}\n\n"
        for shot, tag in zip(others[1:], languages, strict=False)
    )
    wrong = [tag for tag in LANGUAGES if tag != language][rng.integers(len(LANGUAGES) - 1)]
    return Translation(
        shots + _question(sentence[0], language),
        shots + _question(sentence[0], wrong),
        shots + _question(other[0], language),
        f"{sentence[0]}\n",
        f" {_in(sentence, language)}",
        f" {_in(sentence, wrong)}",
        f" {_in(other, language)}",
        language,
    )


def _question(english: str, language: str) -> str:
    return f"English: {english}\n{language}:"


def _in(sentence: tuple[str, str, str, str], language: TargetLanguage) -> str:
    return sentence[1 + LANGUAGES.index(language)]
