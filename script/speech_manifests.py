"""Makes a data set from Asterisk's English prompts, for script/data: speech_manifests.py UNPACKED_PACKAGES NEW_FOLDER

Writes the WAV files and train.jsonl, dev.jsonl and test.jsonl (audio_filepath, duration, text), split by a hash of the
file's name: about 80, 10 and 10 %. Transcripts contain only spoken words: digits as words, without stage directions and
names of symbols in brackets. Skips recordings without speech.
"""
import gzip
import hashlib
import json
import pathlib
import re
import shutil
import sys
import wave

DIGITS = "zero one two three four five six seven eight nine".split()
SPOKEN = {"#": " pound ", "*": " star ", "&": " and ", "@": " at "}
# Numbers that are not spoken digit by digit.
NUMBERS = {"28.8": "twenty eight point eight", "500": "five hundred", "600": "six hundred", "8500": "eighty five hundred"}


def spoken(text):
    text = re.sub(r"\([^)]*\)|\[[^]]*\]|<[^>]*>", " ", text)
    text = re.sub(r"\d+(?:\.\d+)?", lambda found: f" {NUMBERS.get(found[0], found[0])} ", text)
    text = re.sub(r"\d", lambda found: f" {DIGITS[int(found[0])]} ", text)
    text = re.sub(r"\b([A-Za-z])\.(?=[A-Za-z]\b)", r"\1 ", text)  # A.M. is spoken as two letters.
    for sign, word in SPOKEN.items():
        text = text.replace(sign, word)
    text = re.sub(r"[^a-z' ]", " ", text.lower().replace("\u2019", "'"))
    return " ".join(text.split())


def split_of(name):
    share = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100
    return "train" if share < 80 else "dev" if share < 90 else "test"


packages, folder = map(pathlib.Path, sys.argv[1:])
sounds = next(packages.glob("usr/share/asterisk/sounds/en_US_*"))
with gzip.open(next(packages.glob("usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz")), "rt") as file:
    lines = [line.strip().partition(":") for line in file if line.strip() and not line.startswith(";")]
transcripts = {name: spoken(text) for name, _, text in lines}
splits = {"train": [], "dev": [], "test": []}
skipped = seconds = 0
for path in sorted(sounds.rglob("*.wav")):
    name = path.relative_to(sounds).with_suffix("").as_posix()
    if not transcripts.get(name):
        skipped += 1
        continue
    with wave.open(str(path)) as recording:
        duration = recording.getnframes() / recording.getframerate()
    target = folder / f"{name}.wav"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
    line = {"audio_filepath": f"{name}.wav", "duration": round(duration, 3), "text": transcripts[name]}
    splits[split_of(name)].append(json.dumps(line))
    seconds += duration
for split, lines in splits.items():
    if not lines:
        sys.exit("no recording with a transcript")
    (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
counts = ", ".join(f"{len(lines)} {split}" for split, lines in splits.items())
print(f"{seconds / 60:.1f} minutes: {counts}; {skipped} without speech or transcript skipped", file=sys.stderr)
