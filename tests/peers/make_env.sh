#!/usr/bin/env bash
# Makes the virtual environment in which other libraries load our checkpoints: make_env.sh FOLDER [PYTHON]
#
# A CPU build of torch is asked for first and then held by a constraint, so that nothing pulls gigabytes of CUDA wheels.
# gptqmodel 7.7 wants a newer torch; 7.6.0 takes 2.13. compressed-tensors 0.20 cannot load asymmetric checkpoints.
set -euo pipefail
folder=${1:?"usage: make_env.sh FOLDER [PYTHON]"}
python=${2:-python3}
if [[ -f $folder/.complete ]]; then
    echo "$folder is there already"
    exit 0
fi
"$python" -m venv "$folder"
constraint=$folder/constraint.txt
echo "torch==2.13.0" >"$constraint"
"$folder/bin/pip" install -q --retries 0 --timeout 15 --extra-index-url https://download.pytorch.org/whl/cpu \
    torch==2.13.0+cpu || "$folder/bin/pip" install -q torch==2.13.0
PIP_CONSTRAINT=$constraint "$folder/bin/pip" install -q \
    gptqmodel==7.6.0 optimum==2.3.0 transformers==5.17.0 compressed-tensors==0.19.0 accelerate safetensors
touch "$folder/.complete"
