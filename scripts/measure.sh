#!/usr/bin/env bash
# Measure everything that the report needs, on this machine's GPUs:
#
#     bash scripts/measure.sh FOLDER [--ckpt WEIGHTS --vae DECODER] [--fork CHECKOUT] [--gpus N]
#         [--model NAME] [--image-size PX] [--num-sampling-steps N] [--precision TIER...]
#         [--repeats N] [--load SECONDS] [--window SECONDS]
#
# --fork: a checkout of the organisers' program, which is then timed too (eight grids: 70 minutes
# on a V100). --gpus: at most so many GPUs (default: all; without a GPU: two processes on the
# CPU). --precision: tiers (default: all but bf16). Without weights the networks are random:
# arithmetic costs the same, the pictures are a rehearsal's. A shorter rehearsal:
# --num-sampling-steps 20. Without a GPU the demo is measured on the CPU.
#
# A file that is there, whole, is not measured again, so a run that was stopped resumes with the
# same command; remove a file to renew it. A folder of another command or machine is refused.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ -d .venv ]]; then
  export PATH="$PWD/.venv/bin:$PATH"
fi
fail() {
  echo "measure.sh: $1" >&2
  exit 2
}
log=${1:-}
if [[ $log == -h || $log == --help ]]; then
  sed -n '2,/^set/s/^# \{0,1\}//p' scripts/measure.sh
  exit
fi
[[ -n $log && $log != -* ]] ||
  fail "name the folder for the measurements: bash scripts/measure.sh log/mine"
shift
asked=$*
# Steps need no decoder; whole runs have a number of steps.
network=() run=() steps=() tiers=() gpus= fork=
while (($#)); do
  flag=$1 values=()
  shift
  while (($#)) && [[ $1 != --* ]]; do
    values+=("$1")
    shift
  done
  ((${#values[@]})) || fail "$flag: give a value"
  case $flag in
    --ckpt | --model | --image-size) network+=("$flag" "${values[@]}") ;;
    --vae | --num-sampling-steps | --repeats) run+=("$flag" "${values[@]}") ;;
    --load | --window) steps+=("$flag" "${values[@]}") ;;
    --precision) tiers=("$flag" "${values[@]}") ;;
    --gpus) gpus=${values[0]} ;;
    --fork) fork=${values[0]} ;;
    *) fail "$flag: no such flag; bash scripts/measure.sh --help lists them" ;;
  esac
done
[[ -z $fork || -f $fork/sample.py ]] ||
  fail "--fork $fork: has no sample.py; name the organisers' checkout"
mkdir -p "$log" 2>/dev/null && touch "$log/.writable" 2>/dev/null ||
  fail "$log: no folder can be made or written there; name another"
rm "$log/.writable"

read -r found machine < <(python -c 'import torch; n = torch.cuda.device_count(); \
print(n, torch.cuda.get_device_name() if n else "CPU")') || fail "python has no torch: make .venv/ready"
if ((found)); then
  gate=(--gate 1)
else
  echo "No GPU: the demo is measured on the CPU, one thread a process."
  export OMP_NUM_THREADS=1 # one process and many then compute the same bits
  network=(--model DiT-Demo/2 --device cpu "${network[@]}") # a later --model wins
  run=(--repeats 1 "${run[@]}")
  gate=()
fi
gpus=${gpus:-$((found ? found : 2))}
this=$(printf '%s\n' "bash scripts/measure.sh $log${asked:+ $asked}" "up to $gpus × $machine")
if [[ -e $log/asked.txt && $(<"$log/asked.txt") != "$this" ]]; then
  before=$(<"$log/asked.txt")
  fail "$log is of another run (${before//$'\n'/, }), this is ${this//$'\n'/, }; name another folder"
fi
echo "$this" >"$log/asked.txt"

measure() { # FILE COMMAND...
  local file=$log/$1
  shift
  [[ -e $file && ! -e $file.unfinished ]] && { echo "== $file is there"; return; }
  echo "== $*"
  touch "$file.unfinished" # results are written as they come: a file alone does not say that it is whole
  "$@" --output "$file"
  rm "$file.unfinished"
}

counts=(1) # of GPUs
for ((n = 2; n <= gpus; n *= 2)); do counts+=("$n"); done
jobs=(python bench/measure.py jobs "${network[@]}" "${run[@]}")
for n in "${counts[@]}"; do
  measure "contest-$n.json" "${jobs[@]}" "${tiers[@]}" --gpus "$n"
done
measure ladder.json python bench/measure.py ladder "${network[@]}" "${steps[@]}" "${tiers[@]}" "${gate[@]}" --profile
if ((gpus > 1)); then
  measure layouts.json torchrun --standalone --nproc_per_node="$gpus" bench/measure.py layouts \
    "${network[@]}" --load 1 --window 1 "${steps[@]}" "${tiers[@]}"
  for n in "${counts[@]}"; do
    measure "label-$n.json" "${jobs[@]}" "${tiers[@]}" --labels 0 --gpus "$n"
  done
fi
[[ -z $fork ]] || measure fork.json "${jobs[@]}" --fork "$fork"
echo "Now choose the picture that you hand in: $(echo "$log"/contest-"${counts[-1]}"-*.png)"
echo "Then: python scripts/report.py output/report --team TEAM --log $log --picture PICTURE"
