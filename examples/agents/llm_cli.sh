# The command-line agent `llm` with a function as its tool, streaming. OPENAI_BASE_URL, from the
# environment, is all that it has to know; the name of the model is any that it knows.
#
#     rollout.agent: sh examples/agents/llm_cli.sh .venv-agents/bin
export LLM_USER_PATH="$(mktemp -d)"
trap 'rm -rf "$LLM_USER_PATH"' EXIT
question="$("$1/python" -c 'import json, sys; print(json.load(sys.stdin)["question"])')"
"$1/llm" -m gpt-4o-mini --no-log --chain-limit 5 --functions examples/agents/llm_tool.py \
    "$question" || echo "llm cannot read a call: its turns are trained all the same"
