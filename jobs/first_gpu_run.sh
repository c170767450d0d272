#!/usr/bin/env bash
# What a machine with a GPU is asked for once: run opcast's GPU tests, measure everything twice, run the quickstart, and
# pack what came out into one archive, which `opcast import source=bundle path=FOLDER.tar.gz` takes.
#
#     bash jobs/first_gpu_run.sh [FOLDER]            # about an hour; FOLDER is first_gpu_run unless given
#     SITE=mylab LICENSE=CC-BY-4.0 bash jobs/first_gpu_run.sh    # who measured, and what the rows are shared under
#     PYTHON=.venv-vllm/bin/python bash jobs/first_gpu_run.sh    # with the kernels of an engine that bootstrap.py installed
#     SMALL=1 HARDWARE=cpu bash jobs/first_gpu_run.sh FOLDER     # the same steps in minutes, on the CPU
#
# With several GPUs the collectives between them are measured too, in ten minutes more. Under Slurm, with FOLDER on a disk
# that all nodes see:
#
#     sbatch --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 --gpu-bind=none --exclusive --mem=0 --time=3:00:00 \
#         --wrap "bash jobs/first_gpu_run.sh FOLDER"
#
# runs everything on the first node, then the collectives between the nodes.
#
# It needs Python 3.11 to 3.14 and room for 10 GB; a torch of this Python that uses the GPU is kept. Stop it whenever
# you like: the same command goes on where it was. Steps, in this order:
#   1 set-up       .venv beside this checkout (skipped where PYTHON names an interpreter that has opcast)
#   2 provenance   what the machine, driver and software are
#   3 tests        the tests that need a GPU
#   4 campaign     campaign=full into store_1, the clocks once a second beside it
#   5 again        the same into store_2, and how well both agree, kind by kind
#   6 collectives  campaign=collectives into store_1, where there are several GPUs
#   7 nodes        the same between the nodes of a Slurm job
#   8 quickstart   measure, learn, simulate, run three steps for real, compare
#   9 check        what is doubtful in store_1, and what failed there
#  10 archive      FOLDER.tar.gz: send this file
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${1:-first_gpu_run}
mkdir -p "$out/done" && out=$(cd "$out" && pwd) || exit 2
hardware=${HARDWARE:-cuda}
small=${SMALL:-}
python=${PYTHON:-}
site=${SITE:-first-gpu-run}
license=${LICENSE:-Apache-2.0}
campaign=(campaign=full "+settings.device=$hardware")
collectives=(campaign=collectives "+settings.device=$hardware")
quickstart=("hardware=$hardware")
if [ -n "$small" ]; then
    cases='campaign.cases=[{kind: gemm, m: [8, 16, 24], n: [64, 96], k: [32, 48]}, {kind: copy, size_bytes: [4096, 65536]}]'
    patient=start_timeout_s=1800    # other work may slow a shared machine down
    campaign=(campaign=quick "$cases" "+settings.device=$hardware" +settings.case_budget_s=0.01 "+settings.$patient")
    collectives+=("+settings.$patient" 'campaign.cases=[{kind: all_reduce, size_bytes: [1024, 65536], ranks: 2}]' 'campaign.canaries=[]')
    quickstart+=("$cases" campaign.settings.case_budget_s=0.01 "+campaign.settings.$patient" model.config.hidden_size=128
        model.config.intermediate_size=256 model.config.num_attention_heads=2 model.config.num_key_value_heads=1
        model.config.num_hidden_layers=1 model.config.vocab_size=512 rounds=1 train.seq_len=32 prefill.seq_len=32
        decode.seq_len=32 repeats.decode=2 operator_repeats=1 tracking=null)
fi
failed=()

say() { echo "first run: $*" >&2; }

# step NAME WORDS COMMAND...: run a step once; its output goes to FOLDER/NAME.log. A step that fails is run again next time.
step() {
    local name=$1 words=$2 began=$SECONDS
    shift 2
    if [ -e "$out/done/$name" ]; then
        say "$name: done before"
        return 0
    fi
    say "$name: $words"
    if "$@" >"$out/$name.log" 2>&1; then
        date -u +%FT%TZ >"$out/done/$name"
        say "$name: done in $((SECONDS - began)) s"
    else
        say "$name: FAILED after $((SECONDS - began)) s, see $out/$name.log: $(tail -n 1 "$out/$name.log")"
        failed+=("$name")
        return 1
    fi
}

opcast() { "$python" -P -m opcast.jobs.cli "$@"; }

provenance() {
    {
        echo "commit: $(git -C "$here" rev-parse HEAD 2>/dev/null || echo unknown)"
        echo "changed files: $(git -C "$here" status --porcelain 2>/dev/null | wc -l)"
        uname -srm
        "$python" -c "import json; from dataclasses import asdict; from opcast.harness import accelerator
print(json.dumps(asdict(accelerator.ask())))" || { echo "$python cannot run opcast" >&2; return 1; }
    } >"$out/machine.txt"
    "$python" -m pip list --format=freeze >"$out/packages.txt"
    lscpu >"$out/processor.txt" 2>/dev/null || true
    # Serial numbers and UUIDs name one card of one owner: they stay here.
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi -q | grep -vi "serial\|uuid" >"$out/nvidia_smi.txt"
        nvidia-smi topo -m >"$out/topology.txt" 2>&1 || true
    elif command -v rocm-smi >/dev/null; then
        rocm-smi --showproductname --showclocks --showpower >"$out/rocm_smi.txt" 2>&1 || true
    fi
    [ "$hardware" = cpu ] || grep -q '"hardware": "cuda"' "$out/machine.txt" ||
        { echo "no GPU that torch can use: $(tail -n 1 "$out/machine.txt")"; return 1; }
}

gpu_tests() {
    local alone=()
    ! "$python" -c "import xdist" 2>/dev/null || alone=(-n 0)
    (cd "$here" && mapfile -t files < <(grep -rl --include="test_*.py" "mark\.gpu" tests) &&
        "$python" -P -m pytest -m gpu -q -p no:cacheprovider "${alone[@]}" "${files[@]}")
}

# Clocks, power and heat of the first GPU once a second, while a command runs.
with_clocks() {
    local file=$1 watch=
    shift
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi -i 0 --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active \
            --format=csv -l 1 >"$file" 2>&1 &
        watch=$!
    fi
    "$@"
    local code=$?
    [ -z "$watch" ] || kill "$watch" 2>/dev/null
    return $code
}

profile() { with_clocks "$out/clocks_$1.csv" opcast profile "${campaign[@]}" "store=$out/$1" format=json >"$out/$1.json"; }

gpus() { "$python" -c "import torch; print(torch.cuda.device_count())" 2>/dev/null || echo 0; }

collectives() {
    opcast profile "${collectives[@]}" "store=$out/store_1" format=json >"$out/collectives.json"
}

# Every task sees all GPUs of its node and takes that of its place: one that sees a single GPU cannot reach the others.
between_nodes() {
    local master
    master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) || return 1
    opcast profile "${collectives[@]}" "plan_out=$out/nodes_plan.json" format=json || return 1
    srun --ntasks-per-node="$1" --gpu-bind=none bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS \
        LOCAL_WORLD_SIZE='"$1"' MASTER_ADDR='"$master"' MASTER_PORT=29500 exec "$0" -P -m opcast.harness.collectives "$@"' \
        "$python" "$out/nodes_plan.json" "$out/store_1"
}

# What is doubtful is no failure of this run. Messages of failures stay out of a bundle's rows: here they are counted.
check() {
    opcast data check "store=$out/store_1" format=json >"$out/check.json" || [ $? -eq 1 ] || return 1
    "$python" -P - "$out/store_1" >"$out/failures.json" <<'END'
import json, sys
from collections import Counter
from opcast.datasets.store import Store

store, counts = Store(sys.argv[1]), Counter()
for kind in store.kinds():
    for row in store.read(kind, status=None, newest=False, columns=["backend", "status", "error"]).to_pylist():
        if row["status"] != "ok":
            counts[kind, row["backend"], row["status"], row["error"] or ""] += 1
names = ("kind", "backend", "status", "error")
print(json.dumps([{**dict(zip(names, key)), "rows": count} for key, count in counts.most_common()], indent=1))
END
}

# A campaign that ran out of time has outcome "deadline": its rows count all the same.
again() {
    profile store_2 && opcast data repeat "store=$out/store_1" "against=$out/store_2" format=json >"$out/repeatability.json"
}

quick() {
    opcast quickstart "${quickstart[@]}" "home=$out/home" "report=$out/quickstart.html" format=json >"$out/quickstart.json"
}

archive() {
    local names="" file
    cd "$out" || return 1
    for file in *.txt *.csv *.json *.html *.log; do
        [ ! -f "$file" ] || names+="${names:+,}'$out/$file'"
    done
    opcast data bundle "store=$out/store_1" "output=$out.tar.gz" "site=$site" "license=$license" "attach=[$names]" >&2
}

if [ -z "$python" ]; then
    step setup "setting up .venv, several minutes and up to 10 GB" python3 "$here/jobs/bootstrap.py" install || exit 1
    python=$here/.venv/bin/python
fi
step provenance "what this machine is" provenance || exit 1
step tests "GPU tests, minutes" gpu_tests
step campaign "everything once, about 20 minutes on a fast GPU" profile store_1
step again "everything again, and how well both agree" again
if [ "$hardware" = cuda ] && [ "$(gpus)" -gt 1 ]; then
    step collectives "between the $(gpus) GPUs here, about 10 minutes" collectives
elif [ "$hardware" = cpu ] && [ -n "$small" ]; then
    step collectives "between two processes" collectives
fi
if [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ] && command -v srun >/dev/null; then
    step nodes "between $SLURM_JOB_NUM_NODES nodes" between_nodes "${RANKS_PER_NODE:-$(gpus)}"
fi
step quickstart "measure, learn, simulate, run for real, compare: about 5 minutes" quick
step check "what is doubtful, and what failed" check
say "packing $out.tar.gz"
archive || { say "could not write $out.tar.gz"; exit 1; }
say "done: send $out.tar.gz ($(du -h "$out.tar.gz" | cut -f1)); \`opcast import source=bundle path=$out.tar.gz\` reads it"
if [ ${#failed[@]} -gt 0 ]; then
    say "failed steps: ${failed[*]}; the archive holds their logs; the same command runs them again"
    exit 1
fi
