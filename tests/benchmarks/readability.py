"""How easy the documents are to read: Flesch's reading ease of their prose, and words a sentence. Higher is easier.

206.835 - 1.015 words a sentence - 84.6 syllables a word (Flesch 1948). Code, tables, links' targets and comments are
left out; what is left in backticks counts as one word of two syllables, so that names of settings do not decide.

    python tests/benchmarks/readability.py README.md docs/*.md [--at REVISION]
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = "setting"  # stands for what is in backticks


def prose(text: str) -> str:
    """The sentences of a Markdown page; headings and items of lists are sentences of their own."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(\||    ).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", CODE, text)
    text = re.sub(r"^#+ .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", ".\n", text, flags=re.MULTILINE)
    return text.replace("**", "").replace("*", "")


def syllables(word: str) -> int:
    """Groups of vowels, without a silent e at the end."""
    word = word.lower()
    count = len(re.findall(r"[aeiouy]+", word))
    if word.endswith("e") and not word.endswith(("le", "ee")) and count > 1:
        count -= 1
    if word.endswith("ed") and not word.endswith(("ted", "ded")) and count > 1:
        count -= 1
    return max(count, 1)


def ease(text: str) -> tuple[float, float, int]:
    """Reading ease, words a sentence and number of words of a page."""
    parts = re.split(r"[.!?](?:\s|$)|:\s*\n|\n\s*\n", prose(text))
    sentences = [re.findall(r"[A-Za-z][A-Za-z'-]*", part) for part in parts]
    kept = [words for words in sentences if words]
    words = [word for sentence in kept for word in sentence]
    long = len(words) / len(kept)
    return 206.835 - 1.015 * long - 84.6 * sum(map(syllables, words)) / len(words), long, len(words)


def by_hand(text: str) -> int:
    """Words of a page that somebody wrote, tables and code left out."""
    text = re.sub(r"<!-- ([\w ]+) -->.*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->|^```.*?^```|^\|[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return len(text.split())


def main() -> int:
    """A line for each page."""
    arguments = sys.argv[1:]
    revision = arguments.pop(arguments.index("--at") + 1) if "--at" in arguments else ""
    for name in (each for each in arguments if each != "--at"):
        if revision:
            shown = subprocess.run(["git", "show", f"{revision}:{name}"], cwd=ROOT, capture_output=True, text=True)
            if shown.returncode:
                continue
            text = shown.stdout
        else:
            text = (ROOT / name).read_text(encoding="utf-8")
        score, long, _ = ease(text)
        print(f"{name:28} reading ease {score:5.1f}, {long:4.1f} words a sentence, {by_hand(text):5} words by hand")
    return 0


if __name__ == "__main__":
    sys.exit(main())
