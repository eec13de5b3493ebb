# The first steps of every batch file: find the repository's python. A job starts in the folder
# where it was submitted, or in that of sbatch --chdir=FOLDER; this is the repository.
# Another site: put its module or conda environment, with requirements.txt installed, in place of
# the PATH line.
fail() {
    echo "slurm: $1" >&2
    exit 2
}

export PATH="$PWD/.venv/bin:$PATH"
python -c 'import importlib.util as find, sys; sys.exit(not find.find_spec("torch"))' 2>/dev/null ||
    fail "no python with torch: $PWD has no .venv (make .venv/ready), and no other is on the PATH (slurm/setup.sh)"
CPUS=${SLURM_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS=$CPUS

# Set GPUS to the number of GPUs of this node.
require_gpus() {
    GPUS=${SLURM_GPUS_ON_NODE:-$(tr , '\n' <<<"${CUDA_VISIBLE_DEVICES:-}" | grep -c . || true)}
    [ "$GPUS" -gt 0 ] || fail "this job has no GPU: submit it with --gres=gpu:4, or as many as there are"
}
