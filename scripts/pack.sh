#!/usr/bin/env bash
# The contest's hand-in, TEAM_DiT.tar.gz: the code, your measurements, the result and the report.
#
#     bash scripts/pack.sh REPORT [FILE...] [--with|--without]
#
# REPORT is a folder that scripts/report.py wrote. FILE... are other files, such as the report in a
# second language.
#
# The archive holds:
# - sample.png and baseline.png, the judged pictures; verdict.txt, evaluate.py's output about
#   them; RUN.md, how to repeat the result; environment.txt; log/FINAL_RESULT.txt: tier, T, command.
# - the files that git tracks, without the authors' example in log/. Of weights only the demo
#   models', which are small. --with: untracked files too, --without: leave them out. Where there
#   are some, one of the two must be given.
# - the log of the report with its pictures and traces, REPORT, FILE..., and Slurm's outputs:
#   *.out in log/ and output/.
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
((${#words[@]})) || fail "name the report: bash scripts/pack.sh output/report"
report=${words[0]}
[[ -f $report/report.json ]] ||
  fail "$report: holds no report; python scripts/report.py $report --team TEAM --log LOG --picture PNG"
git rev-parse --git-dir >/dev/null 2>&1 ||
  fail "no git checkout, which says what belongs to it: git init && git add ."

# The archive's name, the number of paragraphs to write, and the log's folder; a line if a file
# has changed since the report.
facts=$(python3 - "$report" <<'END'
import hashlib, json, sys
from pathlib import Path

folder = Path(sys.argv[1])
report = json.loads((folder / "report.json").read_text())
log = Path(report["log"])


def require(path, digest):
    if not path.is_file() or not hashlib.sha256(path.read_bytes()).hexdigest().startswith(digest):
        sys.exit(f"pack.sh: {path}: is not the file of this report; write the report again")


for name in ("sample", "baseline"):
    row = report["result" if name == "sample" else "baseline"]
    require(folder / f"handin/{name}.png", row["picture"])
for source in report["sources"]:
    require(log / source["file"], source["digest"])
rehearsal = "_rehearsal" if report["job"]["rehearsal"] else ""
print(f"{report['team']}_DiT{rehearsal}", report["to_write"], log)
END
) || exit 2
read -r name to_write log <<<"$facts"
files=("$log" "${words[@]}")
for file in "${files[@]}"; do
  [[ -e $file ]] || fail "$file: no such file or folder"
  [[ $(realpath "$file") == "$PWD"/* ]] || fail "$file: lies outside the repository"
done
unfinished=$(find "$log" -name '*.unfinished' | head -n 1)
[[ -z $unfinished ]] || fail "${unfinished%.unfinished}: is not finished: wait, or if nothing \
runs, give the same measure.sh command again"
files+=(log/*.out output/*.out)

# Git's view of the code.
weights=('*.pt' '*.pth' '*.ckpt' '*.safetensors')
deleted=$(git ls-files --deleted)
[[ -z $deleted ]] || fail "git tracks files that are gone: ${deleted//$'\n'/ }; bring them back \
(git checkout -- FILE) or tell git (git rm FILE)"
others=$(git ls-files --others --exclude-standard -- "${weights[@]/#/:!}" \
  ':!output' ':!log' ':!pretrained_models' "${files[@]/#/:!}")
[[ -z $others || $untracked ]] || fail "git does not track these files: ${others//$'\n'/ }; give \
--with to pack them too, or --without to leave them out"
[[ $untracked == --with ]] || others=

archive=$name.tar.gz
stage=$(mktemp -d)
trap 'rm -rf "$stage" ".$archive.part"' EXIT
mkdir -p "$stage/$name"
{
  git ls-files -z -- "${weights[@]/#/:!}" ':!log/example'
  git ls-files -z -- pretrained_models/demo
} | tar -cf - --null -T - | tar -C "$stage/$name" -xf -
tar -cf - --files-from <(printf %s "$others") | tar -C "$stage/$name" -xf -
for file in "${files[@]}"; do
  tar -cf - "${weights[@]/#/--exclude=}" --exclude=handin "$(realpath --relative-to=. "$file")" |
    tar -C "$stage/$name" -xf -
done
cp -r "$report"/handin/. "$stage/$name/"
tar -C "$stage" -czf ".$archive.part" "$name"
mv ".$archive.part" "$archive"
echo "$archive: $(tar -tzf "$archive" | grep -c '[^/]$') files, $(du -h "$archive" | cut -f1)"
cat "$report/handin/log/FINAL_RESULT.txt"
((to_write == 0)) || echo "TO WRITE: the report still has $to_write such paragraphs"
