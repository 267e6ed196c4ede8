//! Memory fit for direct I/O: owned, aligned, recycled.
//!
//! Invariants:
//! - All memory is zeroed when it is first taken from the system, so no safe call can show
//!   uninitialised memory. Recycled memory keeps what its last user wrote; it is only seen by a
//!   caller that moves the length over bytes it did not write.
//! - A block has one owner: an [`AlignedBuf`] or the pool's free list.
//! - The pool never keeps more than `retain_max_bytes` of unused memory; beyond that, blocks go back
//!   to the system at once.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// The smallest block, and the alignment of every block.
pub const CAPACITY_MIN_BYTES: usize = 4 << 10;
/// The largest block: room for the largest request that an NBD client may send (32 MiB, NBD's
/// default maximum) with the parts of blocks before and after it.
pub const CAPACITY_MAX_BYTES: usize = 64 << 20;

const CLASS_MIN_LOG2: u32 = CAPACITY_MIN_BYTES.trailing_zeros();
const CLASSES: usize = (CAPACITY_MAX_BYTES.trailing_zeros() - CLASS_MIN_LOG2 + 1) as usize;

const _: () = assert!(CAPACITY_MIN_BYTES.is_power_of_two());
const _: () = assert!(CAPACITY_MAX_BYTES.is_power_of_two());

/// Capacity is `CAPACITY_MIN_BYTES << class`.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Class(u8);

impl Class {
    fn for_capacity(capacity_bytes: usize) -> Class {
        assert!(
            capacity_bytes <= CAPACITY_MAX_BYTES,
            "a buffer of {capacity_bytes} bytes was asked for; the limit is {CAPACITY_MAX_BYTES}"
        );
        let log2 = capacity_bytes.max(CAPACITY_MIN_BYTES).next_power_of_two().trailing_zeros();
        Class((log2 - CLASS_MIN_LOG2) as u8)
    }

    fn capacity_bytes(self) -> usize {
        CAPACITY_MIN_BYTES << self.0
    }

    fn layout(self) -> Layout {
        let bytes = self.capacity_bytes();
        Layout::from_size_align(bytes, CAPACITY_MIN_BYTES).expect("a class is a valid layout")
    }
}

/// One allocation. It has no destructor: [`Block::release`] is called by whoever owns it last.
struct Block {
    ptr: NonNull<u8>,
    class: Class,
}

// SAFETY: a block is plain memory with one owner; nothing about it is tied to a thread.
unsafe impl Send for Block {}

impl Block {
    fn allocate(class: Class) -> Block {
        let layout = class.layout();
        // SAFETY: the layout's size is at least CAPACITY_MIN_BYTES, so it is not zero.
        let ptr = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(ptr) else { handle_alloc_error(layout) };
        Block { ptr, class }
    }

    fn release(self) {
        // SAFETY: `ptr` came from `alloc_zeroed` with this very layout, and the block is consumed.
        unsafe { dealloc(self.ptr.as_ptr(), self.class.layout()) }
    }
}

struct PoolInner {
    free: [Mutex<Vec<Block>>; CLASSES],
    retain_max_bytes: usize,
    retained_bytes: AtomicUsize,
    in_use_bytes: AtomicUsize,
}

impl PoolInner {
    fn take(&self, class: Class) -> Block {
        let bytes = class.capacity_bytes();
        self.in_use_bytes.fetch_add(bytes, Ordering::Relaxed);
        // A poisoned lock is harmless: `Vec::push` and `pop` leave the list whole when they panic.
        let mut free = self.free[class.0 as usize].lock().unwrap_or_else(PoisonError::into_inner);
        match free.pop() {
            Some(block) => {
                self.retained_bytes.fetch_sub(bytes, Ordering::Relaxed);
                block
            }
            None => {
                drop(free); // zeroing a large block takes a while
                Block::allocate(class)
            }
        }
    }

    fn give_back(&self, block: Block) {
        let bytes = block.class.capacity_bytes();
        self.in_use_bytes.fetch_sub(bytes, Ordering::Relaxed);
        let room = self.retained_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| {
            now.checked_add(bytes).filter(|sum| *sum <= self.retain_max_bytes)
        });
        if room.is_err() {
            return block.release();
        }
        let class = block.class.0 as usize;
        self.free[class].lock().unwrap_or_else(PoisonError::into_inner).push(block);
    }
}

impl Drop for PoolInner {
    fn drop(&mut self) {
        for free in &mut self.free {
            let free = free.get_mut().unwrap_or_else(PoisonError::into_inner);
            free.drain(..).for_each(Block::release);
        }
    }
}

/// How much memory a pool stands for at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolUsage {
    /// Bytes in buffers that somebody holds.
    pub in_use_bytes: usize,
    /// Bytes kept for the next user.
    pub retained_bytes: usize,
}

/// Hands out [`AlignedBuf`]s and takes them back when they are dropped, on any thread.
///
/// A clone is another handle to the same pool. Memory outlives the handles while buffers are in use.
#[derive(Clone)]
pub struct BufPool(Arc<PoolInner>);

impl BufPool {
    /// A pool that keeps at most `retain_max_bytes` of unused memory.
    ///
    /// This bounds what lies idle. What is in use is bounded by the callers, who hold it.
    pub fn new(retain_max_bytes: usize) -> BufPool {
        BufPool(Arc::new(PoolInner {
            free: std::array::from_fn(|_| Mutex::new(Vec::new())),
            retain_max_bytes,
            retained_bytes: AtomicUsize::new(0),
            in_use_bytes: AtomicUsize::new(0),
        }))
    }

    /// An empty buffer that holds at least `capacity_bytes`: the next power of two.
    ///
    /// # Panics
    /// If `capacity_bytes` exceeds [`CAPACITY_MAX_BYTES`]; a request of such a size must have been
    /// refused where it came in.
    pub fn get(&self, capacity_bytes: usize) -> AlignedBuf {
        let block = self.0.take(Class::for_capacity(capacity_bytes));
        AlignedBuf { ptr: block.ptr, class: block.class, len: 0, pool: self.0.clone() }
    }

    /// A buffer that holds a copy of `data` (at most [`CAPACITY_MAX_BYTES`]).
    pub fn copy_of(&self, data: &[u8]) -> AlignedBuf {
        let mut buf = self.get(data.len());
        buf.extend_from_slice(data);
        buf
    }

    /// What is in use and what is kept.
    pub fn usage(&self) -> PoolUsage {
        PoolUsage {
            in_use_bytes: self.0.in_use_bytes.load(Ordering::Relaxed),
            retained_bytes: self.0.retained_bytes.load(Ordering::Relaxed),
        }
    }
}

impl fmt::Debug for BufPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufPool")
            .field("retain_max_bytes", &self.0.retain_max_bytes)
            .field("usage", &self.usage())
            .finish()
    }
}

/// Owned memory of fixed capacity, aligned for direct I/O, with a length like a `Vec`.
///
/// Dereferences to the first `len` bytes. Goes back to its pool when dropped.
pub struct AlignedBuf {
    ptr: NonNull<u8>,
    class: Class,
    len: usize,
    pool: Arc<PoolInner>,
}

// SAFETY: the buffer owns its memory alone; the pool behind it is shared through locks and atomics.
unsafe impl Send for AlignedBuf {}
// SAFETY: through a shared reference the memory can only be read.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// The length that the buffer can grow to. A power of two.
    pub fn capacity(&self) -> usize {
        self.class.capacity_bytes()
    }

    /// How many bytes are filled.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is filled.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Sets the length to zero.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Sets the length. Bytes that the caller has not written are those of the memory's last user,
    /// or zero.
    ///
    /// # Panics
    /// If `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "length {len} exceeds capacity {}", self.capacity());
        self.len = len;
    }

    /// The part behind the length, to be filled before [`set_len`](Self::set_len).
    pub fn spare_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        &mut self.whole_mut()[len..]
    }

    /// Appends a copy of `data`.
    ///
    /// # Panics
    /// If there is no room for it.
    pub fn extend_from_slice(&mut self, data: &[u8]) {
        self.spare_mut()[..data.len()].copy_from_slice(data);
        self.len += data.len();
    }

    /// Appends `count` zero bytes.
    ///
    /// # Panics
    /// If there is no room for them.
    pub fn extend_zeroed(&mut self, count: usize) {
        self.spare_mut()[..count].fill(0);
        self.len += count;
    }

    /// Removes the first `count` bytes and moves the rest to the front.
    ///
    /// # Panics
    /// If `count` exceeds the length.
    pub fn consume(&mut self, count: usize) {
        let len = self.len;
        self.whole_mut().copy_within(count..len, 0);
        self.len = len - count;
    }

    /// Turns `range` of the filled part into [`Bytes`] without copying, so that the same memory can
    /// be written to disk and sent. The memory goes back to the pool after the last clone is gone.
    ///
    /// # Panics
    /// If the range reaches beyond the length.
    pub fn freeze(self, range: Range<usize>) -> Bytes {
        let len = self.len;
        assert!(range.start <= range.end && range.end <= len, "{range:?} is not within 0..{len}");
        if range.is_empty() {
            return Bytes::new();
        }
        let whole = Bytes::from_owner(self);
        if range.len() == len { whole } else { whole.slice(range) }
    }

    /// Turns the filled part into [`Bytes`] without copying.
    pub fn freeze_all(self) -> Bytes {
        let len = self.len;
        self.freeze(0..len)
    }

    /// The whole memory, as long as the capacity. Bytes behind the length are of its last user, or zero. The address
    /// stays the same wherever the buffer is moved to.
    pub fn whole_mut(&mut self) -> &mut [u8] {
        // SAFETY: `ptr` is an owned, initialised allocation of `capacity` bytes, and `&mut self`
        // makes this the only access for the life of the slice.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.capacity()) }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the allocation is owned and initialised, `len` is at most its capacity, and it
        // cannot be written while `self` is borrowed.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        &mut self.whole_mut()[..len]
    }
}

impl AsRef<[u8]> for AlignedBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        self.pool.give_back(Block { ptr: self.ptr, class: self.class });
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuf({} of {} bytes)", self.len, self.capacity())
    }
}
