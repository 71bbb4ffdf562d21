"""Random calls on every store and composition against a dictionary."""

from pathlib import Path

from hypothesis import HealthCheck, settings

from kvcomm.store import DiskStore, Keyring, MemoryStore, Store, TieredStore, WriteBack
from kvcomm.store.machine import StoreMachine

SETTINGS = settings(
    max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


class Memory(StoreMachine):
    def make_store(self, folder: Path) -> Store:
        return MemoryStore(1 << 16)


class SmallMemory(StoreMachine):
    evicts = True

    def make_store(self, folder: Path) -> Store:
        return MemoryStore(4 * 384, max_entries=3)


class Disk(StoreMachine):
    reopens = True

    def make_store(self, folder: Path) -> Store:
        return DiskStore(folder)


class SmallDisk(StoreMachine):
    reopens = evicts = True

    def make_store(self, folder: Path) -> Store:
        return DiskStore(folder, max_entries=3, durable=False)


class Tiers(StoreMachine):
    reopens = True

    def make_store(self, folder: Path) -> Store:
        return TieredStore([MemoryStore(3 * 384), DiskStore(folder, keyring=Keyring(b"k" * 32), durable=False)])


class WrittenBehind(StoreMachine):
    reopens = True

    def make_store(self, folder: Path) -> Store:
        tiers = [MemoryStore(3 * 384, name="device"), MemoryStore(1 << 14), DiskStore(folder, durable=False)]
        return TieredStore(tiers, placement=WriteBack())


for machine in (Memory, SmallMemory, Disk, SmallDisk, Tiers, WrittenBehind):
    machine.TestCase.settings = SETTINGS

TestMemory = Memory.TestCase
TestSmallMemory = SmallMemory.TestCase
TestDisk = Disk.TestCase
TestSmallDisk = SmallDisk.TestCase
TestTiers = Tiers.TestCase
TestWrittenBehind = WrittenBehind.TestCase
