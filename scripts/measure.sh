#!/usr/bin/env bash
# Measure everything that the report needs, on this machine's GPUs:
#
#     bash scripts/measure.sh FOLDER [--ckpt WEIGHTS --vae DECODER --image-size PX]
#         [--vgg-weights FILE] [--num-sampling-steps N]
#
# Without weights the networks are random (arithmetic costs the same) and pictures are verified on the demo. A file
# that is there, whole, is not measured again, so a run that was stopped resumes; remove a file to renew it. A folder
# with measurements of another GPU, model or weights is refused. --vgg-weights is for LPIPS. --num-sampling-steps (default:
# 250) shortens a rehearsal. Without a GPU the demo is
# measured on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ -d .venv ]]; then
  export PATH="$PWD/.venv/bin:$PATH"
fi
log=${1:-}
if [[ $log == -h || $log == --help ]]; then
  sed -n '2,/^set/s/^# \{0,1\}//p' scripts/measure.sh
  exit
fi
if [[ -z $log || $log == -* ]]; then
  echo "measure.sh: name the folder for the measurements: bash scripts/measure.sh log/mine" >&2
  exit 2
fi
shift
# Steps and profiles need no decoder, verify.py alone VGG16; whole runs have a number of steps.
network=() decoder=() vgg=() run=()
while (($#)); do
  case $1 in
    --vae) decoder=("${@:1:2}") ;;
    --vgg-weights) vgg=("${@:1:2}") ;;
    --num-sampling-steps) run=("${@:1:2}") ;;
    *) network+=("${@:1:2}") ;;
  esac
  shift 2 || shift
done
if ((${#vgg[@]})) && [[ ! -f ${vgg[1]:-} ]]; then
  echo "measure.sh: --vgg-weights ${vgg[1]:-}: no such file" >&2
  exit 2
fi
mkdir -p "$log" 2>/dev/null && touch "$log/.writable" 2>/dev/null || {
  echo "measure.sh: $log: no folder can be made or written there; name another" >&2
  exit 2
}
rm "$log/.writable"

measure() { # FILE COMMAND...
  local file=$log/$1 status=0
  shift
  [[ -e $file && ! -e $file.unfinished ]] && { echo "== $file is there"; return; }
  echo "== $*"
  mkdir -p "$(dirname "$file")"
  touch "$file.unfinished" # results are written as they come: a file alone does not say that it is whole
  "$@" || status=$?
  # Missing a criterion is a result.
  [[ $status == 0 || $2 == scripts/verify.py && $status == [13] ]] || return "$status"
  rm "$file.unfinished"
}

machine=$(python scripts/before_measuring.py "$log" "${network[@]}" "${decoder[@]}" "${run[@]}") || exit
read -r gpus tiers <<<"$machine"
if ((gpus)); then
  ranks=$gpus ladder=(--gate 3)
  shared=(--gate --image-size 512 1024 256) verify=("${network[@]}" "${decoder[@]}")
  ((${#verify[@]})) || verify=(--model DiT-Demo/2)
else
  echo "No GPU: the demo is measured on the CPU. There is no comparison with the compiler."
  ranks=2 ladder=()
  shared=(--labels 1 2) verify=(--model DiT-Demo/2)
fi
profile=(python bench/profile_step.py "${network[@]}")
upstream=fp32
[[ $tiers == *tf32* ]] && upstream=tf32 # upstream's setting where the GPU has it
measure profile-baseline.json "${profile[@]}" --precision $upstream --output "$log/profile-baseline.json"
steps=(python bench/steps.py "${network[@]}")
measure ladder.json "${steps[@]}" "${ladder[@]}" --output "$log/ladder.json"
if ((gpus)); then
  measure profile-fast.json "${profile[@]}" --output "$log/profile-fast.json"
  measure versus.json "${steps[@]}" --only "CUDA graph" --vs compile --output "$log/versus.json"
fi
jobs=(python bench/jobs.py "${network[@]}" "${decoder[@]}" "${run[@]}")
# shellcheck disable=SC2086  # a list of words
measure contest.json "${jobs[@]}" --contest $tiers --output "$log/contest.json"
measure verify/verify.json python scripts/verify.py "${verify[@]}" "${vgg[@]}" "${run[@]}" --output "$log/verify"
sections="1 2 3"
if ((ranks > 1)); then
  torchrun=(torchrun --standalone --nproc_per_node="$ranks")
  measure parallel.json "${torchrun[@]}" bench/many_gpus.py "${shared[@]}" --output "$log/parallel.json"
  # shellcheck disable=SC2086
  measure contest-gpus.json "${jobs[@]}" --contest $tiers --gpus "$ranks" \
    --output "$log/contest-gpus.json"
  sections="1 2 3 4"
fi
echo "Now: python scripts/report.py output/report --team TEAM --log $log --sections $sections"
