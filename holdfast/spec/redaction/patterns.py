"""Names of secrets, and patterns of secrets in texts, of names with their values, and of values that are no secrets."""

import re
from functools import lru_cache

HIDDEN = "(hidden)"
MOST = 8192  # maximum characters of one secret

# --- URLs and remote locations ---

_NO_SPACE = r"(?:[^\s@:\"'\\<>]|:(?!//)|\\[^\s\"']|\\{0,8}[\"'](?!\\*[\s,:;}\])\"']|$))"
USER = re.compile(
    r"(?<=://)(?:"
    r"[^\s/?#:@\"'\\\[\]<>]{0,256}:(?!//|\d{1,5}(?:[/?#\s\"'\\,;)\]}]|$))"  # a port, not a password
    rf"(?:{_NO_SPACE}{{1,256}}+[ ]){{0,3}}{_NO_SPACE}{{0,512}}+@(?:{_NO_SPACE}{{0,256}}+@){{0,8}}"
    r"|[^/?#\s'\"\\@:\[\]<>]{1,512}@"
    r"|@)"
)
SCP = re.compile(
    r"(?<![\w./:@-])[A-Za-z_][\w.-]{0,63}:(?!/)[^\s@:\"'\\,]{3,256}@(?!sha\d)[A-Za-z0-9][\w.-]{0,253}(?=[:/])"
)
HOOKS = re.compile(
    r"(?i)(hooks\.slack(?:-gov)?\.com/|discord(?:app)?\.com/api/(?:v\d{1,2}/)?webhooks/|"
    r"\.webhook\.office\.com/|outlook\.office(?:365)?\.com/webhook/|hooks\.zapier\.com/hooks/|"
    r"\.logic\.azure\.com(?::443)?/|chat\.googleapis\.com/v1/spaces/|api\.telegram\.org/(?:file/)?bot|"
    r"/hooks/(?=[a-z0-9]{20}))[^\s\"'<>\\)(]{1,2048}"
)
ENCODED = re.compile(  # a name in a URL, of which a part or the sign after it is written with percent signs
    r"(?:(?<![\w.\-%])|(?<=%3[Ff])|(?<=%26))([A-Za-z](?:[\w.\-]|%5[Ff]|%2[DdEe]){1,63}+)(=|%3[Dd])"
)
ENCODED_VALUE = re.compile(r"(?:(?!%26)[^\s\"'&#;,]){1,2048}")
SIGNATURE = re.compile(r"(?=[^\d]*\d)[A-Za-z0-9_=-]{16,}")

# --- Keys with a known form ---

_KEY_FORMS = (
    r"hf_(?:[A-Za-z0-9]{30,200}|(?=[A-Za-z]{0,64}\d)[A-Za-z0-9]{10,200})",
    r"gh[pousr]_[A-Za-z0-9]{16,255}",
    r"github_pat_[A-Za-z0-9_]{16,255}",
    r"gl(?:pat|dt|rt|cbt|ptt|ft|soat)-[\w-]{16,255}",
    r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,20}(?![A-Za-z0-9])",
    r"sk-(?=[\w-]{0,64}\d)[A-Za-z0-9][\w-]{15,255}",
    r"(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{10,255}",
    r"whsec_[A-Za-z0-9+/=]{16,255}",
    r"xox[a-z]-[\w-]{10,255}",
    r"xapp-[\w-]{10,255}",
    r"npm_[A-Za-z0-9]{30,255}",
    r"pypi-Ag[\w-]{20,512}",
    r"AIza[\w-]{30,255}",
    r"ya29\.[\w-]{16,512}",
    r"SG\.[\w-]{12,255}\.[\w-]{12,255}",
    r"dapi[0-9a-f]{32}",
    r"nvapi-[\w-]{20,255}",
    r"r8_[A-Za-z0-9]{30,255}",
    r"gsk_[A-Za-z0-9]{30,255}",
    r"hv[sb]\.[\w-]{20,255}",
    r"d(?:op|oo|or)_v1_[0-9a-f]{32,255}",
    r"AGE-SECRET-KEY-1[A-Z0-9]{40,255}",
    r"gl(?:sa|c)_[A-Za-z0-9+/=_]{20,512}",
    r"xai-[A-Za-z0-9]{40,255}",
    r"pplx-[A-Za-z0-9]{30,255}",
    r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{16,255}",
    r"figd_[\w-]{20,255}",
    r"tskey-[a-z]{2,20}-[\w-]{16,255}",
    r"lin_api_[A-Za-z0-9]{20,255}",
    r"sntry[su]_[\w+/=-]{20,512}",
    r"ATATT3[\w=-]{40,512}",
    r"dckr_pat_[\w-]{16,255}",
    r"wandb_v\d_[\w-]{16,255}",
    r"eyJ[\w-]{8,4096}\.[\w-]{6,4096}(?:\.[\w-]{0,4096})?",
)
SHAPES = re.compile(r"(?<![A-Za-z0-9_])(?:" + "|".join(_KEY_FORMS) + ")")
WANDB = re.compile(r"(?i)(wandb[^\n]{0,80}?(?<![0-9a-z]))[0-9a-f]{40}(?![0-9a-z])")
PEM = re.compile(r"-----BEGIN[^-\n]{0,40}PRIVATE KEY[^-\n]{0,20}-----")
PEM_END = re.compile(r"-----END(?:[^-\n]{0,60}-----)?")
PEM_BODY = re.compile(r"(?:[A-Za-z0-9+/=\s,:-]|\\[nr\\]){0,16384}")

# --- Notations in which a secret follows ---

BEARER = re.compile(r"(?i)(\bbearer[ \t]{1,4})([\w.~+/=-]{8,4096})")
LOGIN = re.compile(
    r"(?im)(\blogin\s{1,4}\S{1,256}\s{1,4}password\s{1,4}|^[ \t]{0,16}password[ \t]{1,4}(?=\S{1,256}[ \t]*$))"
    r"([^\s\"'\\]{1,256})"
)
OPTION = re.compile(r"(?<![\w-])(--?)([A-Za-z][\w-]{1,63}+)([\"']?,?[ \t]{1,4}[\"']?)([^\s\"'\\-][^\s\"'\\]{0,512})")
CURL = re.compile(r"(?<!\S)((?:-u|--user|--proxy-user)[ =][\"']?[^\s:\"']{1,64}:)([^\s\"'\\]{1,256})")
PHRASE = re.compile(
    r"(?i)((?:passw(?:or)?d|passphrase|(?:api|access|secret|private)[_ -]?key)(?: for [\w.@-]{1,64})?(?: is| was)?:?"
    r"[ \t]{1,4}[\"']?|\bidentified by [\"'])([^\s\"'\\]{6,256})"
)
PAIR = re.compile(
    r"(?i)((?:auth[ ]?=[ ]?|basicauth|digestauth)\([ ]?[\"'][^\"'\n]{0,256}[\"'][ ]?,[ ]?b?[\"'])([^\"'\n]{1,1024})"
)
XML = re.compile(r"<([A-Za-z][\w.:-]{1,63})>([^<>]{1,4096})(?=</\1>)")

# --- A name and its value ---

NAME = re.compile(
    r"(?<![\w.\-])([\w.\-]++)(\\*[\"'])?+(?:(\]?\s{0,4}(?:=>|:=|=(?!=)|:(?!:))\s{0,4})|(\s{0,2},\s{0,2})(?=b?\\*[\"']))"
)
OPENS = re.compile(r"(?:[\[(]\s{0,2})?[bruf]?(\\*)([\"'])")
OUTER = re.compile(r"\\*\"(?=\s{0,4}(?:[,:}\]]|$))")
SCHEME = re.compile(r"(?i)(?:bearer|basic|token|digest|negotiate|apikey|key|aws4-hmac-sha256)[ \t]{1,4}(?=\S)")
BARE = re.compile(r"(?:[^\s\"'&\\;,]|[;,](?![\w .\-]{1,40}[=:])|\\\\|\\[^\"'\\nrtbfu\s])+")
BLOCK = re.compile(
    r"[|>][+-]?\d?[ ]*\n(?:[ \t]{1,64}[^\n]{0,4096}(?:\n|$)){1,64}|[|>][+-]?\d?[ ]*\\n[ \t]{1,64}[^\n\"\\]{0,4096}"
)
REST = re.compile(r"[^\r\n\"'\\]*")
LINE = re.compile(r"(?m)(?:^|[\"']|\\n)[ \t]{0,40}(?:- )?[\w.\-]{1,100}[ \t]{0,4}:[ \t]{0,4}\Z")
KIND_OF_KEY = re.compile(r"(?i)(?:^|\W)(?:api|access|secret|private|account|auth) $")

# --- Values that are no secrets ---

NOTHING = re.compile(r"(?i)(?:none|null|nil|true|false|undefined|yes|no|\*{2,}|x{3,}|\.{3}|)$")
REFERENCE = re.compile(r"\$[\w({]|\{\{|%[({]|<[\w .-]{1,40}>$|\(hidden\)|\[|\{")
PROSE = re.compile(r"(?i)(?:secrets|credentials?|^pass)$")
SENTENCE = re.compile(  # the first word of a sentence after a name and a colon
    r"(?:is|are|was|were|has|have|had|not|no|must|cannot|can|may|should|does|do|did|the|a|an|at|by|in|of|on|to|for|from|"
    r"with|without|wrong|missing|invalid|required|unknown|expired|denied|expected|unexpected|empty|given|set|use|please|"
    r"needs?|allowed|refused|value|text|use|looks|carries|it|this|that)[.?!]?$"
)
CALL = re.compile(r"[A-Za-z_][\w.]{0,100}\(")
PLACEHOLDERS = re.compile(  # common words as values; removing them would hide nothing
    r"password|passwd|secret|secrets|changeme|default|example|testing|minioadmin|hidden|localhost|postgres"
    r"|holdfast|holdfast-secrets|username|token|string"
)
_SPLIT = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+")
_ALWAYS = re.compile(
    r"webhook(?<!^webhook)|^webhook_|connection_?string|(?:^|_)dsn$|"
    r"(?:^|_)(?:db|database|postgres(?:ql)?|pg|my_?sql|maria_?db|mongo(?:_?db)?|redis|amqp|rabbitmq|broker|celery)_?"
    r"(?:url|uri)$"
)
_ABOUT = re.compile(  # names that describe a secret, and are not secrets
    r"_(?:file|path|dir|folder|name|names|ref|refs|type|types|length|len|count|counts|size|version|policy|mode|enabled|"
    r"ttl|expir[a-z]*|url|uri|host|port|endpoint|sock|field|fields|header|prefix|limit|kind|format|provider|class|"
    r"manager|store|required|optional|algorithm)$"
)
_STRONG = re.compile(
    r"passw|passphrase|secret(?!ar)|credential|authorization|bearer|(?:^|_)jwt(?:_|$)|cookie|(?:^|_)[a-z]*pwd(?:_|$)|"
    r"(?:api|access|private|account|signing|encryption|auth|client|shared|ssh|service|storage|session|master|license|"
    r"openai|anthropic|wandb|azure|gcp|aws|stripe|deploy|subscription|hmac)_?key|"
    r"(?:db|user|smtp|ssh|admin|root|ftp|mail|redis|pg|sql|http|proxy|login)_?pass$"
)
_WEAK = re.compile(r"(?:^|_)(?:[a-z]*token|auth|pw|pat|sas|sig|signature|creds?|key|webhook)$")
_STAGE = re.compile(r"_(?:prod|dev|test|staging|old|new|[0-9]+)$")
_OF_TEXT = re.compile(  # words before `token` that mean a token of a tokenizer
    r"bos|eos|pad|unk|unknown|mask|sep|cls|stop|end|start|begin|special|added|next|prev|previous|last|first"
    r"|per|each|image|audio|video|byte|control|fim|max|min|num|n|reserved|text|of|target|input|output|every"
    r"|sub|word|draft|bad|empty|blank|this|that"
)
_OF_DATA = re.compile(  # words before `KEY` that mean a data key, not a secret
    r"cache|sort|partition|primary|foreign|public|store|object|row|group|order|dict|host|map"
)
HEADERS = re.compile(r"authorization$|cookie2?$")
# Every name of a secret contains one of them.
PARTS = tuple(
    """
    pass pwd pw secret cred token key auth bearer jwt cookie pat sas sig dsn webhook connection url uri code
    """.split()
)
IN_QUERY = frozenset("key code auth pass pw".split())  # names in the query of a URL


@lru_cache(4096)
def name_strength(name: str) -> int:
    """How likely a name is that of a secret: 2 certain, 1 likely, 0 not."""
    normalised = _STAGE.sub("", _SPLIT.sub("_", name[-200:]).strip("_").lower())
    if normalised in ("pwd", "oldpwd"):  # in shells: the current folder
        return 0 if name.isupper() else 1
    about = _ABOUT.search(normalised) is not None
    if _ALWAYS.search(normalised) or (not about and _STRONG.search(normalised)):
        return 2
    return int(
        not about and _WEAK.search(normalised) is not None and _is_likely(name, *("", *normalised.split("_"))[-2:])
    )


def _is_likely(name: str, before: str, last: str) -> bool:
    if last == "key":
        return bool(before) and name.isupper() and not _OF_DATA.fullmatch(before)
    of_text = _OF_TEXT.fullmatch(before) or _OF_TEXT.fullmatch(last.removesuffix("token"))
    return not (last.endswith("token") and of_text)


def names_secret(name: str) -> bool:
    """Whether the name of a variable or a key means that its value is a secret."""
    return name_strength(name) > 0


def looks_random(value: str) -> bool:
    """Whether a value is not a word: it is long enough, and is not only letters of one case."""
    return len(value) >= 8 and (any(c.isdigit() for c in value) or value.lower() != value != value.capitalize())
