#!/usr/bin/env bash
# Measure a whole run without the workflow, for machines too old to run it (a Jetson Nano):
#
#   scripts/measure_here.sh results/<device>/<run>
#
# The folder holds settings.json, made on another machine; the extension is built. Needs
# Python 3.6 with PyTorch and numpy; PYTHON=/path/to/python3 names another one. After a kill the
# same command goes on: finished steps are kept unless the extension or the scripts changed.
set -euo pipefail

results=${1:?"expected the folder of the run, results/<device>/<run>"}
settings=$(readlink -f "$results")/settings.json
if [[ ! -f $settings ]]; then
    echo "error: no $settings; see envs/jetson-nano.md on how to make it" >&2
    exit 1
fi
results=$(dirname "$settings")
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD/python
stamp=build/extension.json
sources=build/sources.sha256
mkdir -p "$results"/{weights,check,bench}

say() { printf '%s  %s\n' "$(date +%T)" "$*"; }

# Whether the file is missing, or older than what it depends on; further files after it.
outdated() {
    local file=$1 source
    [[ -s $file ]] || return 0
    for source in "$settings" "$stamp" "$sources" "${@:2}"; do
        [[ ! $source -nt $file ]] || return 0
    done
    return 1
}

# The same content keeps the old file, and with it what was measured.
renew() {
    if cmp --silent "$1" "$2"; then rm "$1"; else mv "$1" "$2"; fi
}

"$python" scripts/stamp.py --out build/extension.new.json
renew build/extension.new.json "$stamp"
# So it is with the code that measures: what the workflow's rules depend on. A figure's changes
# nothing.
modules="arguments autotune conv cpu cuda device files layer ops packed plan samples_file schedule
    seal settings weights"
for source in scripts/{weights,check,ceilings,bench,ablation,fixed_cost}.py \
    python/packedconv/bench/*.py $(printf 'python/packedconv/%s.py ' $modules); do
    case ${source##*/} in
        cpu_experiments.py | cpu_steps.py | experiment.py | rotation.py | rungs.py | spread.py) ;;
        mnn.py | peers.py) ;;
        *) [[ ! -f $source ]] || sha256sum "$source" ;;
    esac
done >build/sources.new
renew build/sources.new "$sources"

layers=$("$python" -c 'import json, sys
for layer in json.load(open(sys.argv[1]))["layers"]:
    print(layer["name"])' "$settings")
# The experiments are about a GPU, and no part of the paper's protocol.
experiments=$("$python" -c 'import json, sys
settings = json.load(open(sys.argv[1]))
if settings["device"]["kind"] == "cuda" and settings.get("contenders", "all") == "all":
    print("yes")' "$settings")

for layer in $layers; do
    if outdated "$results/weights/$layer.json"; then
        say "weights of $layer"
        "$python" scripts/weights.py --settings "$settings" --layer "$layer" \
            --out "$results/weights/$layer.npz" --manifest "$results/weights/$layer.json"
    fi
    if outdated "$results/check/$layer.csv"; then
        say "checking $layer against float64"
        "$python" scripts/check.py --settings "$settings" --layer "$layer" \
            --weights "$results/weights/$layer.npz" --stamp "$stamp" \
            --out "$results/check/$layer.csv" --facts "$results/check/$layer.json"
    fi
done
if outdated "$results/ceilings.csv"; then
    say "ceilings of the device"
    "$python" scripts/ceilings.py --settings "$settings" --stamp "$stamp" \
        --out "$results/ceilings.csv" --facts "$results/ceilings.json"
fi
for layer in $layers; do
    say "timing $layer"
    # By itself it does not see that scripts changed.
    again=()
    timed=$results/bench/$layer.csv
    [[ ! -e $timed || ! $sources -nt $timed ]] || again=(--force)
    "$python" scripts/bench.py --settings "$settings" --layer "$layer" \
        --weights "$results/weights/$layer.npz" --stamp "$stamp" \
        --out "$timed" --facts "$results/bench/$layer.json" \
        ${again[@]+"${again[@]}"}
done
[[ -z $experiments ]] || mkdir -p "$results"/{ablation,fixed_cost}
for layer in ${experiments:+$layers}; do
    if outdated "$results/ablation/$layer.csv"; then
        say "timing every mapping for $layer"
        "$python" scripts/ablation.py --settings "$settings" --layer "$layer" \
            --weights "$results/weights/$layer.npz" --stamp "$stamp" \
            --out "$results/ablation/$layer.csv" --facts "$results/ablation/$layer.json"
    fi
    # The mapping is the one that was chosen for the layer.
    if outdated "$results/fixed_cost/$layer.csv" "$results/bench/$layer.json"; then
        say "timing what nonzeros do not explain in $layer"
        "$python" scripts/fixed_cost.py --settings "$settings" --layer "$layer" \
            --weights "$results/weights/$layer.npz" --stamp "$stamp" \
            --bench-facts "$results/bench/$layer.json" \
            --out "$results/fixed_cost/$layer.csv" --facts "$results/fixed_cost/$layer.json"
    fi
done
# One list of each kind of file, in the order of the settings.
list() { local layer; for layer in $layers; do printf '%s\n' "$results/$1/$layer.$2"; done; }
mapfile -t bench < <(list bench csv)
mapfile -t facts < <(list bench json)
mapfile -t checks < <(list check csv)
if outdated "$results/samples.csv" "${bench[@]}" "${checks[@]}" "$results/ceilings.csv"; then
    say "collecting"
    "$python" scripts/collect.py --bench "${bench[@]}" --facts "${facts[@]}" \
        --checks "${checks[@]}" --ceilings "$results/ceilings.csv" \
        --ceilings-facts "$results/ceilings.json" --out "$results/samples.csv" \
        --errors "$results/errors.csv" --peaks "$results/peaks.json"
fi
say "done: $results"
