#!/usr/bin/env bash
# Makes the environments in which other libraries convert: make_converters.sh FOLDER [PYTHON]
#
# Three of them, because they want different versions of what they share: FOLDER/autoawq, FOLDER/gptqmodel (with optimum),
# FOLDER/llmcompressor. A CPU build of torch is asked for first and then held by a constraint. AutoAWQ names
# transformers 4.51.3 as the last it was tested with; 5.17 gives the same weights, and qengine needs 5.10 and later.
set -euo pipefail
folder=${1:?"usage: make_converters.sh FOLDER [PYTHON]"}
python=${2:-python3}
mkdir -p "$folder"
constraint=$folder/constraint.txt
echo "torch==2.13.0" >"$constraint"

make() {
    local env=$folder/$1
    [[ -f $env/.complete ]] && return
    "$python" -m venv "$env"
    "$env/bin/pip" install -q --retries 0 --timeout 15 torch==2.13.0+cpu \
        --extra-index-url https://download.pytorch.org/whl/cpu || "$env/bin/pip" install -q torch==2.13.0
    export PIP_CONSTRAINT=$constraint
    case $1 in
    autoawq)
        "$env/bin/pip" install -q numpy setuptools wheel
        "$env/bin/pip" install -q --no-deps autoawq==0.2.9
        "$env/bin/pip" install -q transformers==5.17.0 accelerate "datasets>=2.20" zstandard
        ;;
    gptqmodel)
        "$env/bin/pip" install -q gptqmodel==7.6.0 optimum==2.3.0 transformers==5.17.0 accelerate safetensors
        ;;
    llmcompressor) "$env/bin/pip" install -q llmcompressor==0.14.0.1 ;;
    esac
    unset PIP_CONSTRAINT
    touch "$env/.complete"
}

for name in autoawq gptqmodel llmcompressor; do make "$name"; done
