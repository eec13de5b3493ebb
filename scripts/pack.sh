#!/usr/bin/env bash
# The contest's hand-in, TEAM_DiT.tar.gz: the code, your measurements and the final result.
#
#     bash scripts/pack.sh TEAM [PICTURE [FILE...]] [--with|--without]
#
# PICTURE goes in as log/final_result.png. It must be the picture of a contest measurement:
# bench/jobs.py --contest keeps it beside its record. The default is the newest of
# log/mine/final/*.png and of output/job_*/contest-*.png, which slurm/sample_4gpu.sbatch
# --contest writes, else sample.png.
# FILE... are your measurements, report and pictures, which git need not track. The default is
# log/mine and output/report, where they exist.
#
# The archive holds:
# - the files that git tracks. Of weights only the demo models', which are small. --with:
#   untracked files too, --without: leave them out. Where there are some, one of the two must
#   be given.
# - FILE..., the records beside PICTURE, and Slurm's outputs: *.out in log/ and output/.
# - log/FINAL_RESULT.txt: tier, settings, command and T of the result.
# - environment.txt: packages, GPUs, driver and the command lines of all measurements.
#
# Any other job than the contest's (DiT-XL/2, eight labels at 512 px, 250 steps), and a picture
# of random weights, is packed as a rehearsal, TEAM_DiT_rehearsal.tar.gz.
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
fail() {
  echo "pack.sh: $1" >&2
  exit 2
}
untracked=
words=()
for word in "$@"; do
  case $word in
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' scripts/pack.sh; exit ;;
    --with | --without) untracked=$word ;;
    -*) fail "$word: no such flag; bash scripts/pack.sh --help lists them" ;;
    *) words+=("$word") ;;
  esac
done
set -- "${words[@]}"
team=${1:-}
[[ $team =~ ^[A-Za-z0-9_][A-Za-z0-9_-]*$ ]] ||
  fail "name the team, in letters, digits, - and _: bash scripts/pack.sh TEAM"
measured=(log/mine/final/*.png output/job_*/contest-*.png)
((${#measured[@]})) && picture=$(ls -t "${measured[@]}" | head -n 1)
picture=${2:-${picture:-sample.png}}
shift $(($# > 2 ? 2 : $#))
[[ -f $picture ]] || fail "$picture: no such picture; make and measure one: python bench/jobs.py \
--contest --output log/mine/final/contest.json --ckpt WEIGHTS --vae DECODER"
git rev-parse --git-dir >/dev/null 2>&1 ||
  fail "no git checkout, which says what belongs to it: git init && git add ."
for file in "$@"; do
  [[ -e $file ]] ||
    fail "$file: no such file or folder; measure (bash scripts/measure.sh $file) or name your logs"
  [[ $(realpath "$file") == "$PWD"/* ]] || fail "$file: lies outside the repository"
done
if ! (($#)); then
  for file in log/mine output/report; do
    [[ -e $file ]] && set -- "$@" "$file"
  done
fi
# The records beside the picture, and Slurm's outputs.
if [[ $(realpath "$picture") == "$PWD"/*/* ]]; then
  set -- "$@" "$(dirname "$picture")"/*.json
fi
unfinished=$(find "$@" -name '*.unfinished' 2>/dev/null | head -n 1)
[[ -z $unfinished ]] || fail "${unfinished%.unfinished}: is not finished: wait, or if nothing \
runs, give the same measure.sh command again"
set -- "$@" log/*.out output/*.out output/job_*/*.out

# Git's view of the code.
weights=('*.pt' '*.pth' '*.ckpt' '*.safetensors')
deleted=$(git ls-files --deleted)
[[ -z $deleted ]] || fail "git tracks files that are gone: ${deleted//$'\n'/ }; bring them back \
(git checkout -- FILE) or tell git (git rm FILE)"
others=$(git ls-files --others --exclude-standard -- "${weights[@]/#/:!}" \
  ':!output' ':!log' ':!pretrained_models' "${@/#/:!}")
[[ -z $others || $untracked ]] || fail "git does not track these files: ${others//$'\n'/ }; give \
--with to pack them too, or --without to leave them out"
[[ $untracked == --with ]] || others=

# environment.txt lists the packages of the active environment, else of .venv.
[[ ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} ]] || export PATH="$PWD/.venv/bin:$PATH"
result=$(python3 scripts/handin.py result "$picture" "$@") || exit 2

name=${team}_DiT
[[ $result == REHEARSAL* ]] && name+=_rehearsal
archive=$name.tar.gz
stage=$(mktemp -d)
trap 'rm -rf "$stage" ".$archive.part"' EXIT
mkdir -p "$stage/$name/log"
{
  git ls-files -z -- "${weights[@]/#/:!}"
  git ls-files -z -- pretrained_models/demo
} | tar -cf - --null -T - | tar -C "$stage/$name" -xf -
tar -cf - --files-from <(printf %s "$others") | tar -C "$stage/$name" -xf -
for file in "$@"; do
  tar -cf - "${weights[@]/#/--exclude=}" --exclude='*.trace.json.gz' \
    "$(realpath --relative-to=. "$file")" | tar -C "$stage/$name" -xf -
done
cp "$picture" "$stage/$name/log/final_result.png"
echo "$result" >"$stage/$name/log/FINAL_RESULT.txt"
python3 scripts/handin.py environment "$@" >"$stage/$name/environment.txt"
tar -C "$stage" -czf ".$archive.part" "$name"
mv ".$archive.part" "$archive"
echo "$archive: $(tar -tzf "$archive" | grep -c '[^/]$') files, $(du -h "$archive" | cut -f1)"
echo "$result"
