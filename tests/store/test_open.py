"""Which URLs name a store, and how other URLs are refused."""

import pytest

from holdfast.spec.errors import SpecError
from holdfast.store import open_store


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("file:///a/b", "file:///a/b"),
        ("file:///a/b/", "file:///a/b"),
        ("file:///a/../b", "file:///b"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/some/prefix/", "s3://bucket/some/prefix"),
    ],
)
def test_a_store_shows_its_root(url: str, shown: str) -> None:
    store = open_store(url)
    assert store.url == shown
    assert shown in repr(store)


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("", "az://bucket/prefix"),
        ("/a/b", "az://bucket/prefix"),
        ("http://bucket", "az://bucket/prefix"),
        ("file://a/b", "three slashes"),
        ("file:a", "three slashes"),
        ("s3://", "s3://bucket/prefix"),
        ("s3:///prefix", "s3://bucket/prefix"),
        ("s3://bucket/a?versionId=1", "credentials come from the environment"),
        ("s3://bucket/a#b", "credentials come from the environment"),
    ],
)
def test_an_invalid_store_url_is_refused_with_the_remedy(url: str, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        open_store(url)


@pytest.mark.parametrize("url", ["s3://key:hunter2@bucket/x", "gs://key:hunter2@bucket", "s3://b/x?X-Sig=hunter2"])
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(SpecError) as error:
        open_store(url)
    assert "hunter2" not in str(error.value)
