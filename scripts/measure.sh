#!/usr/bin/env bash
# Measure everything that the report needs, on this machine's GPUs: bash scripts/measure.sh FOLDER [--ckpt WEIGHTS --vae DECODER --image-size PX]
# Without weights the networks are random (arithmetic costs the same) and pictures are verified on the demo. A file that is there, whole, is
# not measured again, so a run that was stopped goes on; remove a file to renew it. Without a GPU the demo is measured on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
log=${1:-}
[[ -n $log && $log != -* ]] || { echo "measure.sh: name the folder for the measurements: bash scripts/measure.sh log/mine" >&2; exit 2; }
shift
mkdir -p "$log"
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
tiers=$(python -c 'import torch; from accel import precision as p; print(*(t for t in p.TIERS if p.supports(t, torch.device("cuda" if torch.cuda.is_available() else "cpu"))))')

measure() { # FILE COMMAND...
  local file=$log/$1 status=0
  shift
  [[ -e $file && ! -e $file.unfinished ]] && { echo "== $file is there"; return; }
  echo "== $*"
  mkdir -p "$(dirname "$file")"
  touch "$file.unfinished" # the scripts write what they have as they go: a file alone does not say that it is whole
  "$@" || status=$?
  [[ $status == 0 || $2 == scripts/verify.py && $status == [13] ]] || return "$status" # falling short of a gate is a result
  rm "$file.unfinished"
}

if ((gpus)); then
  model=() ladder=(--gate 3) verify=("$@") pictures="1 2 4 8 16 32 64" sizes="256 512 1024" ranks=$gpus ddp=("$@") shared=(--gate) link=()
  (($#)) || verify=(--model DiT-Demo/2)
else
  echo "No GPU: the demo is measured on the CPU. Times say nothing about a GPU's; there is no comparison with the compiler and diffusers."
  model=(--model DiT-Demo/2 --load 0.5) ladder=(--only fp32) verify=(--model DiT-Demo/2 --seeds 1) pictures="1 2 4 8" sizes="64 128 256" ranks=2 link=(--repeats 3)
  ddp=(--model DiT-Demo/2 --image-size 128 --precision fp32 --ckpt pretrained_models/demo/dit.safetensors --vae pretrained_models/demo/vae
    --steps 25 --fid-steps 5 --batch 2)
  shared=(--model DiT-Demo/2 --image-size 128 --precision fp32 --labels 1 2)
fi
measure profile-baseline.json python scripts/profile.py --baseline "${model[@]}" "$@" --output "$log/profile-baseline.json"
measure profile-fast.json python scripts/profile.py "${model[@]}" "$@" --output "$log/profile-fast.json"
measure ladder.json python scripts/benchmark.py "${model[@]}" "${ladder[@]}" "$@" --output "$log/ladder.json"
((gpus)) && measure versus.json python scripts/benchmark.py "$@" --only graph --vs compile,diffusers --output "$log/versus.json"
# shellcheck disable=SC2086  # lists of words
measure sweep.json python scripts/benchmark.py "${model[@]}" "$@" --sweep-pictures $pictures --sweep-sizes $sizes --output "$log/sweep.json"
# shellcheck disable=SC2086
measure contest.json python scripts/benchmark.py "${model[@]}" "$@" --contest $tiers --output "$log/contest.json"
measure verify/verify.json python scripts/verify.py "${verify[@]}" --output "$log/verify"
if ((ranks > 1)); then
  measure link.json torchrun --standalone --nproc_per_node="$ranks" scripts/measure_link.py "${link[@]}" --output "$log/link.json"
  measure parallel.json torchrun --standalone --nproc_per_node="$ranks" scripts/benchmark_parallel.py "${shared[@]}" --output "$log/parallel.json"
  measure ddp.json python scripts/measure_ddp.py --gpus "$ranks" "${ddp[@]}" --output "$log/ddp.json"
fi
sections="1 2 3$( ((ranks > 1)) && echo ' 4 5')"
echo "Now: python scripts/report.py output/report --log $log --sections $sections"
