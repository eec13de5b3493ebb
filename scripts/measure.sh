#!/usr/bin/env bash
# Measure everything that the report needs, on this machine's GPUs:
#
#     bash scripts/measure.sh FOLDER [--ckpt WEIGHTS --vae DECODER] [--fork CHECKOUT] [--gpus N]
#         [--model NAME] [--image-size PX] [--num-sampling-steps N] [--grids N] [--precision TIER...]
#         [--repeats N] [--load SECONDS] [--window SECONDS]
#
# --fork: a checkout of the organisers' program, to time too (eight grids: 70 minutes on a V100).
# --gpus: at most so many GPUs (default: all; without a GPU: the demo, by two processes on the CPU).
# --grids: of one process, as the rules ask. --precision: tiers (default: all but bf16). Without
# weights the networks are random: a rehearsal. A shorter one: --num-sampling-steps 20.
#
# A whole file is not measured again: a stopped run resumes with the same command. --fork and tiers
# can be added later; other weights, sizes, steps, grids or GPUs need another folder.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ ! -d .venv ]] || export PATH="$PWD/.venv/bin:$PATH"
fail() { echo "measure.sh: $1" >&2; exit 2; }
log=${1:-}
[[ $log != -h && $log != --help ]] || exec sed -n '2,/^set/s/^# \{0,1\}//p' scripts/measure.sh
[[ -n $log && $log != -* ]] ||
  fail "name the folder for the measurements: bash scripts/measure.sh log/mine"
shift && log=${log%/}
command="bash scripts/measure.sh $log $*"
# Steps need no decoder; whole runs have a number of steps. `options` decide the pictures.
network=() run=() steps=() tiers=() options=() gpus= fork=
while (($#)); do
  flag=$1 values=() && shift
  while (($#)) && [[ $1 != --* ]]; do values+=("$1") && shift; done
  ((${#values[@]})) || fail "$flag: give a value"
  given=$(realpath -qe "${values[0]}" || echo "${values[0]%/}")
  case $flag in
    --ckpt | --model | --image-size) network+=("$flag" "${values[@]}") options+=("$flag $given") ;;
    --vae | --num-sampling-steps | --grids) run+=("$flag" "${values[@]}") options+=("$flag $given") ;;
    --repeats) run+=("$flag" "${values[@]}") ;;
    --load | --window) steps+=("$flag" "${values[@]}") ;;
    --precision) tiers=("${values[@]}") ;;
    --gpus) gpus=${values[0]} ;;
    --fork) fork=$given ;;
    *) fail "$flag: no such flag; bash scripts/measure.sh --help lists them" ;;
  esac
done
[[ -z $fork || -f $fork/sample.py ]] ||
  fail "--fork $fork: has no sample.py; name the organisers' checkout"
[[ -z $fork ]] || compgen -G "$fork/pretrained_models/sd-vae-ft-ema/*.*" >/dev/null ||
  fail "--fork $fork: has no decoder; put its two files into pretrained_models/sd-vae-ft-ema/ there"
[[ -z $fork ]] || (cd "$fork" && python -c 'import models, diffusion, diffusers, torchvision') ||
  fail "--fork $fork: this Python lacks a package that it imports; the error is above"
vgg=${TORCH_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/torch}/hub/checkpoints/vgg16-397923af.pth
[[ -f $vgg ]] || echo "measure.sh: $vgg is not there; report.py will need it for LPIPS: copy it meanwhile"
{ mkdir -p "$log" && exec 9>>"$log/asked.txt"; } 2>/dev/null ||
  fail "$log: no folder can be made or written there; name another"
flock -n 9 || fail "$log: another measure.sh is at work there; wait for its end"
{ read -r found machine && read -ra every; } < <(python -c '
import torch; from accel.runtime import precision as p; n = torch.cuda.device_count()
print(n, torch.cuda.get_device_name() if n else "CPU"); device = torch.device("cuda" if n else "cpu")
print(*[tier for tier in p.TIERS if tier != "bf16" and p.supports(tier, device)])' 9>&-) ||
  fail "python has no torch: make .venv/ready"
gate=(--gate 1)
if ((!found)); then
  echo "No GPU: the demo is measured on the CPU, one thread a process."
  export OMP_NUM_THREADS=1 # one process and many then compute the same bits
  network=(--model DiT-Demo/2 --device cpu "${network[@]}") # a later --model wins
  run=(--repeats 1 "${run[@]}") gate=()
fi
gpus=${gpus:-$((found ? found : 2))}
((!found || gpus <= found)) || fail "--gpus $gpus: this machine has $found"
this="up to $gpus × $machine $(printf '%s\n' "${options[@]}" | sort | paste -sd ' ')"
{ read -r _ && read -r before && read -ra former; } <"$log/asked.txt" || before=$this former=()
[[ $before == "$this" ]] || fail "$log is of another run ($before), this is $this; name another folder"
((${#tiers[@]})) || tiers=("${every[@]}")
tiers=($(printf '%s\n' "${former[@]}" "${tiers[@]}" | awk 'NF && !seen[$0]++'))
counts=(1) # of GPUs
for ((n = 2; n <= gpus; n *= 2)); do counts+=("$n"); done
files=("${counts[@]/#/contest-}" ladder ${fork:+fork})
((gpus == 1)) || files+=(layouts "${counts[@]/#/label-}")
asked=$(printf '%s\n' "$command" "$this" "${tiers[*]}"
  { sed 1,3d "$log/asked.txt"; printf '%s.json\n' "${files[@]}"; } | sort -u)

measure() { # FILE TIERS COMMAND...; what is asked is noted once a file is whole
  local file=$log/$1 lacking=
  for tier in $2; do grep -qs "\"tier\": \"$tier\"" "$file" || lacking=$tier; done
  if [[ -e $file && ! -e $file.unfinished && ! $lacking ]]; then
    echo "== $file is there"
  else
    echo "== ${*:3}"
    [[ ! $2 ]] || touch "$file.unfinished" # results are written as they come; a fork's grids count
    "${@:3}" ${2:+--precision $2} --output "$file"
    rm -f "$file.unfinished"
  fi
  echo "$asked" >"$log/asked.txt"
}

jobs=(python bench/measure.py jobs "${network[@]}" "${run[@]}")
for n in "${counts[@]}"; do measure "contest-$n.json" "${tiers[*]}" "${jobs[@]}" --gpus "$n"; done
measure ladder.json "${tiers[*]}" python bench/measure.py ladder "${network[@]}" "${steps[@]}" "${gate[@]}" --profile
if ((gpus > 1)); then
  measure layouts.json "${tiers[*]}" torchrun --standalone --nproc_per_node="$gpus" bench/measure.py layouts \
    "${network[@]}" --load 1 --window 1 "${steps[@]}"
  label=("${jobs[@]}" --labels 0)
  for n in "${counts[@]}"; do measure "label-$n.json" "${tiers[*]}" "${label[@]}" --gpus "$n"; done
fi
[[ -z $fork ]] || measure fork.json "" "${jobs[@]}" --fork "$fork"
echo "Now choose the picture that you hand in: $(echo "$log"/contest-"${counts[-1]}"-*.png)"
echo "Then: python scripts/report.py output/report --team TEAM --edition EDITION --log $log --picture PICTURE"
