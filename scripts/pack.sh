#!/usr/bin/env bash
# The contest's hand-in, TEAM_DiT.tar.gz: the code, your measurements, the result and the report.
#
#     bash scripts/pack.sh REPORT [FILE...] [--with|--without]
#
# REPORT is a folder that scripts/report.py wrote. FILE... are other files, such as the report in a
# second language. The archive holds:
# - REPORT's hand-in: the judged pictures, verdict.txt, RUN.md, environment.txt, log/FINAL_RESULT.txt
#   (tier, T, command, and code that changed after the measurement);
# - the files that git tracks, without the authors' example in log/; of weights only the demo
#   models'. Where there are untracked files, --with packs them too, --without leaves them out;
# - the log of the report with its pictures and traces, REPORT, FILE..., *.out, log/*.out, output/*.out.
#
# It is a rehearsal, TEAM_DiT_rehearsal.tar.gz, unless the report gives points.
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
fail() { echo "pack.sh: $1" >&2; exit 2; }
untracked= words=()
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

# The archive's name, the number of paragraphs to write, the log's folder and commit; a line if a
# file changed since the report, or if a report is of something else.
facts=$(python3 - "${words[@]}" <<'END'
import hashlib, json, sys
from pathlib import Path


def require(path, digest):
    if not path.is_file() or not hashlib.sha256(path.read_bytes()).hexdigest().startswith(digest):
        sys.exit(f"pack.sh: {path}: is not the file of this report; write the report again")


first = None
for folder in [word for word in sys.argv[:0:-1] if Path(word, "report.json").is_file()]:
    report = json.loads(Path(folder, "report.json").read_text())
    named = [report["team"], report["log"], report["edition"]["name"], report["result"]["grids"]]
    first = first or named
    if named != first:
        sys.exit(f"pack.sh: {folder}: is of another team, log, edition or picture than the other")
    log = Path(report["log"])
    for file in (report["notes_file"], *report["sources"]):
        require(log / file["file"], file["digest"])
    for kind, row in (("sample", report["result"]), ("baseline", report["baseline"])):
        for index, grid in enumerate(row["grids"]):
            file = f"output/{kind}_{index}.png" if len(row["grids"]) > 1 else f"{kind}.png"
            require(Path(folder, "handin", file), grid["picture"])
rehearsal = "_rehearsal" if report["job"]["rehearsal"] else ""
[commit] = [each["commit"] for each in report["sources"] if each["file"] == report["result"]["record"]]
print(f"{report['team']}_DiT{rehearsal}", report["to_write"], log, commit)
END
) || exit 2
read -r name to_write log commit <<<"$facts"
changed=$(git diff --name-only "${commit%-dirty}" -- '*.py' '*.cu' '*.sh' '*.toml' 2>/dev/null ||
  echo "not a commit here")
[[ $commit != *-dirty ]] || changed="uncommitted code was measured. $changed"
note=${changed:+Code that changed after the measurement by commit $commit: ${changed//$'\n'/ }}
files=("$log" "${words[@]}")
for file in "${files[@]}"; do
  [[ -e $file ]] || fail "$file: no such file or folder"
  [[ $(realpath "$file") == "$PWD"/* ]] || fail "$file: lies outside the repository"
done
files+=(*.out log/*.out output/*.out)

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
echo "${note:-The code is that of the measurement.}" >>"$stage/$name/log/FINAL_RESULT.txt"
tar -C "$stage" -czf ".$archive.part" "$name"
mv ".$archive.part" "$archive"
echo "$archive: $(tar -tzf "$archive" | grep -c '[^/]$') files, $(du -h "$archive" | cut -f1)"
cat "$stage/$name/log/FINAL_RESULT.txt"
((to_write == 0)) || echo "TO WRITE: the report still has $to_write such paragraphs"
