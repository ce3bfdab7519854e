"""Request sets shared by every engine: lists of (prompt, output_tokens), plus multi-turn chats."""

import random
from pydoc_data.topics import topics

WORDS = " ".join(topics[k] for k in sorted(topics)).split()


def text(n_words: int, start: int) -> str:
    start %= len(WORDS) - n_words - 1
    return " ".join(WORDS[start : start + n_words])


def build(seed: int = 0) -> dict:
    rng = random.Random(seed)

    def far():
        return rng.randrange(len(WORDS) - 3000)

    document = text(950, far())
    return {
        "single": [(text(45, far()), 128)],
        "prefill": [(text(950, far()), 1)],
        "batch32": [(text(rng.randint(15, 160), far()), rng.randint(16, 128)) for _ in range(32)],
        "rag16": [(f"{document}\n\nQuestion {i}: {text(12, far())}?", 32) for i in range(16)],
        "chat8": [[(text(40, far()), 24) for _turn in range(4)] for _conv in range(8)],
    }
