"""Secrets in the environment of a run, user code that prints them in many notations, and a search of all its files."""

from pathlib import Path

MARK = "S3CR3T"  # in every secret, and unchanged by the quoting of JSON, Python and URLs
KEY = f"-----BEGIN PRIVATE KEY-----\\n{MARK}google\\n-----END PRIVATE KEY-----\\n"
SECRETS = {
    "AWS_ACCESS_KEY_ID": f"AKIA{MARK}0123456789",
    "AWS_SECRET_ACCESS_KEY": f"{MARK}aws/with+slash",
    "AZURE_STORAGE_SAS_KEY": f"sv=1&sig={MARK}azure%2Fx",
    "DATABASE_URL": f"postgresql://ann:{MARK}database@host/x",
    "GH_PAT": f"{MARK}hub",
    "GOOGLE_SERVICE_ACCOUNT_KEY": f'{{"type": "service_account", "private_key": "{KEY}"}}',
    "HF_TOKEN": f"hf_{MARK}face",
    "KFP_COOKIE": f"session={MARK}cookie",
    "KFP_HEADER": f"X-Auth: {MARK}header",
    "MLFLOW_TRACKING_PASSWORD": f"{MARK} of mlflow",
    "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {MARK}otel",
    "PGPASSWORD": f"{MARK}\"quoted'",
}
LOUD = """import json, logging, os, sys, urllib.parse

def tell():
    values = dict(os.environ)
    print("of", os.getpid(), values, flush=True)
    print(json.dumps(values, indent=1), urllib.parse.urlencode(values), file=sys.stderr, flush=True)
    for name, value in values.items():
        print(value, repr(value), json.dumps(value), f"{name}: {value}", sep="\\n", flush=True)
    logging.getLogger("mine").warning("%s", values)

def show(step, metrics):
    if step == 1:
        tell()

def fails(model, batches):
    tell()
    raise RuntimeError(f"no: {dict(os.environ)} {json.dumps(dict(os.environ))}")
"""


def leaks(folder: Path) -> set[str]:
    """The files below a folder that contain a secret, with some bytes around it."""
    found = set()
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if (at := content.find(MARK.encode())) >= 0:
            found.add(f"{path.relative_to(folder)}: {content[max(0, at - 60) : at + 30]!r}")
    return found
