#!/usr/bin/env bash
# The contest's hand-in: bash scripts/pack.sh TEAM [PICTURE] → TEAM_DiT.tar.gz, everything but weights, caches and virtual environments, with log/ in it.
# PICTURE, the final result (default: sample.png), goes in as log/final_result.png, its name and checksum beside it.
set -euo pipefail
shopt -s globstar
cd "$(dirname "$0")/.."
team=${1:-} picture=${2:-sample.png}
fail() { echo "pack.sh: $1" >&2; exit 2; }
[[ $team =~ ^[A-Za-z0-9_-]+$ ]] || fail "name the team, in letters, digits, - and _: bash scripts/pack.sh TEAM [PICTURE]"
[[ -f $picture ]] || fail "$picture: no such picture; make the final result (python sample.py) or name it: bash scripts/pack.sh $team PICTURE"
compgen -G "log/**/*.json" >/dev/null || fail "log/: holds no measurements; bash scripts/measure.sh log/mine makes them"
archive=${team}_DiT.tar.gz
stage=$(mktemp -d) && trap 'rm -rf "$stage" ".$archive.part"' EXIT
# What a checkout holds, whether or not it is one: no weights wherever they lie (the demo's neither), no environments whatever their name, no outputs.
tar -cf - --exclude=./.git --exclude='./.venv*' --exclude-tag-all=pyvenv.cfg --exclude=__pycache__ --exclude=.pytest_cache --exclude='./*.tar.gz' --exclude=./samples \
  --exclude=./output --exclude='*.pt' --exclude='*.pth' --exclude='*.ckpt' --exclude='*.safetensors' --exclude='./pretrained_models/sd-vae-*' \
  --exclude='*.part' --exclude='./.*.part' --exclude=core . | { mkdir "$stage/${team}_DiT"; tar -C "$stage/${team}_DiT" -xf -; }
cp "$picture" "$stage/${team}_DiT/log/final_result.png"
(cd "$stage/${team}_DiT/log" && { echo "Final result: final_result.png, from $picture"; sha256sum final_result.png; } >FINAL_RESULT.txt)
tar -C "$stage" -czf ".$archive.part" "${team}_DiT"
mv ".$archive.part" "$archive"
echo "$archive: $(tar -tzf "$archive" | grep -c '[^/]$') files, $(du -h "$archive" | cut -f1); final result: log/final_result.png"
