# The first steps of every batch file, which sets DIT, the repository's folder: find its python. A job runs in the folder
# where it was submitted, from which the repository may be read-only.
# Another site: load its module or conda environment, with requirements.txt installed, before sbatch, or here in place of
# the PATH line.
fail() {
    echo "slurm: $1" >&2
    exit 2
}

export PATH="$DIT/.venv/bin:$PATH"
python -c 'import importlib.util as find, sys; sys.exit(not find.find_spec("torch"))' 2>/dev/null ||
    fail "no python with torch: $DIT has no .venv (its owner: make .venv/ready), and there is none on the PATH (load a module)"
CPUS=${SLURM_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS=$CPUS

# Set GPUS to the number of GPUs of this node.
require_gpus() {
    GPUS=${SLURM_GPUS_ON_NODE:-$(tr , '\n' <<<"${CUDA_VISIBLE_DEVICES:-}" | grep -c . || true)}
    [ "$GPUS" -gt 0 ] || fail "this job has no GPU: submit it with --gres=gpu:4, or as many as there are"
}
