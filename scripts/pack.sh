#!/usr/bin/env bash
# The contest's hand-in: TEAM_DiT.tar.gz, with what git tracks but log/ and weights, your logs and the final result.
#
#     bash scripts/pack.sh TEAM [PICTURE [FILE...]]
#
# PICTURE (default: sample.png) goes in as log/final_result.png. It has to be the very picture of a contest measurement
# among FILE... (default: log/mine), your own logs, report and pictures, which git need not track; scripts/measure.sh
# makes one. Its precision tier and settings go into log/FINAL_RESULT.txt. Any other job than DiT-XL/2's eight labels at
# 512 px in 250 steps is packed as a rehearsal: TEAM_DiT_rehearsal.tar.gz, which says so.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() {
  echo "pack.sh: $1" >&2
  exit 2
}
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n 's/^# \{0,1\}//p' scripts/pack.sh
  exit
fi
team=${1:-} picture=${2:-sample.png}
shift $(($# > 2 ? 2 : $#))
(($#)) || set -- log/mine
[[ $team =~ ^[A-Za-z0-9_][A-Za-z0-9_-]*$ ]] || fail "name the team, in letters, digits, - and _: pack.sh TEAM"
[[ -f $picture ]] || fail "$picture: no such picture; make it (python sample.py) or name it: pack.sh $team PICTURE"
git rev-parse --git-dir >/dev/null 2>&1 || fail "no git checkout, which says what belongs to it: git init && git add ."
for file in "$@"; do
  [[ -e $file ]] || fail "$file: no such file or folder; measure (bash scripts/measure.sh $file) or name your logs"
  [[ $(realpath "$file") == "$PWD"/* ]] || fail "$file: lies outside the repository"
done

# The record whose picture this is, from the contest measurements that are named.
result=$(python3 - "$picture" "$@" <<'PYTHON'
import hashlib, json, sys
from pathlib import Path

picture, *named = map(Path, sys.argv[1:])
digest = hashlib.sha256(picture.read_bytes()).hexdigest()
job = dict(model="DiT-XL/2", image_size=512, steps=250, pictures=8)  # as in bench/jobs.py
for file in (file for path in named for file in (sorted(path.rglob("*.json")) if path.is_dir() else [path])):
    if file.suffix != ".json" or not file.is_file():
        continue
    try:
        record = json.loads(file.read_bytes())
        rows = record.get("contest", []) if isinstance(record, dict) else []
        row = next((row for row in rows if row.get("picture") == digest), None)
        if row is None:
            continue
        what = "{model}, {pictures} pictures at {image_size} px in {steps} steps".format(**record)
        lines = [f"Final result: final_result.png, from {picture}", f"Precision tier: {row['tier']}"]
        lines += [f"Settings: {row['settings']}, weights {record['weights']}, commit {record['commit']}"]
        lines += [f"Measured in: {file}", f"T: {row['seconds']:.2f} s", f"SHA-256: {digest}"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError) as error:
        sys.exit(f"pack.sh: {str(file)!r}: is damaged ({type(error).__name__}); measure again or remove it")
    if any(record[key] != value for key, value in job.items()):
        lines = [f"REHEARSAL, which earns no points: {what}, not the contest's job", *lines]
    for line in lines:
        print("".join(one if one.isprintable() else ascii(one)[1:-1] for one in line))
    break
PYTHON
) || exit 2
[[ $result ]] || fail "$picture: is not the picture of a contest measurement in $*; record it: \
python bench/jobs.py --contest TIER --ckpt WEIGHTS --vae DECODER --output log/mine/final.json"

name=${team}_DiT
[[ $result == REHEARSAL* ]] && name+=_rehearsal
archive=$name.tar.gz
stage=$(mktemp -d)
trap 'rm -rf "$stage" ".$archive.part"' EXIT
mkdir -p "$stage/$name/log"
git ls-files -z -- ':!pretrained_models' ':!log' | tar -cf - --null -T - | tar -C "$stage/$name" -xf -
for file in "$@"; do
  tar -cf - --exclude='*.pt' --exclude='*.pth' --exclude='*.ckpt' --exclude='*.safetensors' \
    --exclude='*.trace.json.gz' "$(realpath --relative-to=. "$file")" | tar -C "$stage/$name" -xf -
done
cp "$picture" "$stage/$name/log/final_result.png"
echo "$result" >"$stage/$name/log/FINAL_RESULT.txt"
tar -C "$stage" -czf ".$archive.part" "$name"
mv ".$archive.part" "$archive"
echo "$archive: $(tar -tzf "$archive" | grep -c '[^/]$') files, $(du -h "$archive" | cut -f1)"
echo "$result"
