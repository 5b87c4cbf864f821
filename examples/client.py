"""Ask a server (`examples/serve.sh`) through OpenAI's client. The KV-cache dtype is invisible to it.

python examples/client.py [URL]
"""

from __future__ import annotations

import argparse

from openai import OpenAI

PROMPT = "Remember this: the secret number of Julia is 78868. Question: what is the secret number of Julia?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://localhost:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    print(PROMPT)
    for part in client.completions.create(model=model, prompt=PROMPT, max_tokens=24, temperature=0, stream=True):
        print(part.choices[0].text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
