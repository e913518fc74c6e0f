"""The primitives, all of them from the package `cryptography`: key agreement, masks, sealed messages, randomness."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coterie.core.key import Key

SECRET = 32  # bytes of a seed, of a secret key and of a public key
TAG = 16  # bytes by which a sealed message is longer

Entropy = Callable[[int], bytes]  # so many random bytes; `os.urandom` wherever there is something to protect


class Pair:
    """A key pair of X25519.

    Args:
        secret: The secret key: any `SECRET` random bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self._key = X25519PrivateKey.from_private_bytes(secret)
        self.public = self._key.public_key().public_bytes_raw()

    def agree(self, public: bytes, purpose: bytes) -> bytes:
        """The secret that this pair and the owner of another one have in common, one for every purpose.

        Example:
            >>> a, b = Pair(bytes(32)), Pair(bytes(range(32)))
            >>> a.agree(b.public, b"masks") == b.agree(a.public, b"masks") != b.agree(a.public, b"shares")
            True
        """
        common = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        return HKDF(hashes.SHA256(), SECRET, salt=None, info=b"coterie secure sum: " + purpose).derive(common)


def usable(public: bytes) -> bool:
    """Whether others can agree on a secret with the owner of this public key: there are some with which nobody can.

    Example:
        >>> usable(Pair(bytes(32)).public), usable(bytes(32))
        (True, False)
    """
    try:
        Pair(os.urandom(SECRET)).agree(public, b"trial")
    except ValueError:
        return False
    return True


def mask(seed: bytes, length: int) -> np.ndarray:
    """So many numbers below 2⁶⁴ that look random to everybody who does not know the seed.

    Example:
        >>> mask(bytes(32), 3).dtype, bool((mask(bytes(32), 3) == mask(bytes(32), 5)[:3]).all())
        (dtype('uint64'), True)
    """
    return np.frombuffer(_stream(seed)(8 * length), dtype="<u8")


def seal(key: bytes, sender: int, receiver: int, text: bytes) -> bytes:
    """Encrypt and sign what one client sends to another by way of the server."""
    return ChaCha20Poly1305(key).encrypt(_nonce(sender), text, _address(sender, receiver))


def unseal(key: bytes, sender: int, receiver: int, sealed: bytes) -> bytes:
    """The inverse of `seal`; fails if anything has been changed on the way."""
    return ChaCha20Poly1305(key).decrypt(_nonce(sender), sealed, _address(sender, receiver))


def simulated(key: Key) -> Entropy:
    """Bytes that follow from a key, so that a simulation can be repeated. They protect nothing, for it is no secret."""
    return _stream(hashlib.blake2b(repr(key.path).encode(), digest_size=SECRET, person=b"coterie secure").digest())


def _stream(seed: bytes) -> Entropy:
    """ChaCha20 under a key that is used once, so that its nonce need not change."""
    encryptor = Cipher(ChaCha20(seed, nonce=bytes(16)), mode=None).encryptor()
    return lambda length: encryptor.update(bytes(length))


def _nonce(sender: int) -> bytes:
    """Two clients have one key for a session, under which each sends the other one message."""
    return sender.to_bytes(12, "big")


def _address(sender: int, receiver: int) -> bytes:
    return sender.to_bytes(8, "big") + receiver.to_bytes(8, "big")
