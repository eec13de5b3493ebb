#!/usr/bin/env bash
# The contest's hand-in: TEAM_DiT.tar.gz, with what git tracks, log/ and the final result, without weights.
#
#     bash scripts/pack.sh TEAM [PICTURE [FILE...]]
#
# PICTURE (default: sample.png) goes in as log/final_result.png. It has to be the very picture of a contest measurement
# in log/ or among FILE..., which git need not track: python bench/jobs.py --contest fp16 --ckpt WEIGHTS --output
# log/mine/contest.json makes one, and log/mine is then the FILE. Its precision tier and settings go into
# log/FINAL_RESULT.txt.
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
[[ $team =~ ^[A-Za-z0-9_][A-Za-z0-9_-]*$ ]] || fail "name the team, in letters, digits, - and _: pack.sh TEAM"
[[ -f $picture ]] || fail "$picture: no such picture; make it (python sample.py) or name it: pack.sh $team PICTURE"
git rev-parse --git-dir >/dev/null 2>&1 || fail "no git checkout, which says what belongs to it: git init && git add ."
for file in "$@"; do
  [[ -e $file ]] || fail "$file: no such file or folder"
  [[ $(realpath "$file") == "$PWD"/* ]] || fail "$file: lies outside the repository"
done

# The record whose picture this is, from the contest measurements that are packed.
result=$(python3 - "$picture" "$@" <<'PYTHON'
import hashlib, json, subprocess, sys
from pathlib import Path

picture, *named = map(Path, sys.argv[1:])
digest = hashlib.sha256(picture.read_bytes()).hexdigest()
tracked = subprocess.run(["git", "ls-files", "log"], capture_output=True, text=True, check=True).stdout.split("\n")
files = [Path(name) for name in tracked if name.endswith(".json")]
files += [file for path in named for file in (path.rglob("*.json") if path.is_dir() else [path])]
for file in files:
    record = json.loads(file.read_text()) if file.suffix == ".json" else None
    rows = record.get("contest", []) if isinstance(record, dict) else []
    for row in rows:
        if row.get("picture") == digest:
            weights = f"weights {record['weights']}, commit {record['commit']}"
            print(f"Final result: final_result.png, from {picture}\nPrecision tier: {row['tier']}")
            print(f"Settings: {row['settings']}, {weights}\nMeasured in: {file}\nT: {row['seconds']:.2f} s")
            print(f"SHA-256: {digest}")
            sys.exit()
PYTHON
)
[[ $result ]] || fail "$picture: is not the picture of a contest measurement in log/; record it, then add log/mine: \
python bench/jobs.py --contest TIER --ckpt WEIGHTS --output log/mine/contest.json"

archive=${team}_DiT.tar.gz
stage=$(mktemp -d)
trap 'rm -rf "$stage" ".$archive.part"' EXIT
mkdir "$stage/${team}_DiT"
git ls-files -z -- ':!pretrained_models' | tar -cf - --null -T - | tar -C "$stage/${team}_DiT" -xf -
for file in "$@"; do
  tar -cf - --exclude='*.pt' --exclude='*.pth' --exclude='*.ckpt' --exclude='*.safetensors' \
    --exclude='*.trace.json.gz' "$(realpath --relative-to=. "$file")" | tar -C "$stage/${team}_DiT" -xf -
done
mkdir -p "$stage/${team}_DiT/log"
cp "$picture" "$stage/${team}_DiT/log/final_result.png"
echo "$result" >"$stage/${team}_DiT/log/FINAL_RESULT.txt"
tar -C "$stage" -czf ".$archive.part" "${team}_DiT"
mv ".$archive.part" "$archive"
echo "$archive: $(tar -tzf "$archive" | grep -c '[^/]$') files, $(du -h "$archive" | cut -f1)"
echo "$result"
