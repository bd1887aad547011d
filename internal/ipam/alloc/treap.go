package alloc

import "math/rand/v2"

// Tree is an ordered set with ranks. Each operation takes O(log n). It stores the free ranges of a pool and the queue of
// its waiting claims. It is a treap: random priorities keep it balanced without rotations.
type Tree[T any] struct {
	cmp  func(a, b T) int
	root *treeNode[T]
}

type treeNode[T any] struct {
	item        T
	priority    uint64
	size        int
	left, right *treeNode[T]
}

// NewTree returns an empty set with the order of cmp.
func NewTree[T any](cmp func(a, b T) int) *Tree[T] { return &Tree[T]{cmp: cmp} }

func (n *treeNode[T]) count() int {
	if n == nil {
		return 0
	}
	return n.size
}

func (n *treeNode[T]) update() *treeNode[T] {
	n.size = 1 + n.left.count() + n.right.count()
	return n
}

// split divides n into the items below item and the others.
func (t *Tree[T]) split(n *treeNode[T], item T) (below, rest *treeNode[T]) {
	if n == nil {
		return nil, nil
	}
	if t.cmp(n.item, item) < 0 {
		n.right, rest = t.split(n.right, item)
		return n.update(), rest
	}
	below, n.left = t.split(n.left, item)
	return below, n.update()
}

// merge joins two trees. All items of a are below those of b.
func merge[T any](a, b *treeNode[T]) *treeNode[T] {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	case a.priority > b.priority:
		a.right = merge(a.right, b)
		return a.update()
	default:
		b.left = merge(a, b.left)
		return b.update()
	}
}

// Len is the number of items.
func (t *Tree[T]) Len() int { return t.root.count() }

// Set adds item, or replaces the item that is equal to it.
func (t *Tree[T]) Set(item T) {
	t.Delete(item)
	below, rest := t.split(t.root, item)
	node := &treeNode[T]{item: item, priority: rand.Uint64(), size: 1} // The priorities balance the tree. They are not secret.
	t.root = merge(merge(below, node), rest)
}

// Delete removes the item that is equal to it. It reports whether there was one.
func (t *Tree[T]) Delete(item T) bool {
	var removed bool
	t.root = t.remove(t.root, item, &removed)
	return removed
}

func (t *Tree[T]) remove(n *treeNode[T], item T, removed *bool) *treeNode[T] {
	if n == nil {
		return nil
	}
	switch c := t.cmp(item, n.item); {
	case c < 0:
		n.left = t.remove(n.left, item, removed)
	case c > 0:
		n.right = t.remove(n.right, item, removed)
	default:
		*removed = true
		return merge(n.left, n.right)
	}
	return n.update()
}

// Rank is the number of items below item.
func (t *Tree[T]) Rank(item T) int {
	rank := 0
	for n := t.root; n != nil; {
		if t.cmp(n.item, item) < 0 {
			rank += n.left.count() + 1
			n = n.right
		} else {
			n = n.left
		}
	}
	return rank
}

// Min returns the lowest item.
func (t *Tree[T]) Min() (item T, ok bool) {
	for n := t.root; n != nil; n = n.left {
		item, ok = n.item, true
	}
	return item, ok
}

// Floor returns the highest item that is not above item.
func (t *Tree[T]) Floor(item T) (found T, ok bool) {
	for n := t.root; n != nil; {
		if t.cmp(n.item, item) <= 0 {
			found, ok = n.item, true
			n = n.right
		} else {
			n = n.left
		}
	}
	return found, ok
}

// Ceil returns the lowest item that is not below item.
func (t *Tree[T]) Ceil(item T) (found T, ok bool) {
	for n := t.root; n != nil; {
		if t.cmp(n.item, item) >= 0 {
			found, ok = n.item, true
			n = n.left
		} else {
			n = n.right
		}
	}
	return found, ok
}

// Ascend calls yield for the items in order until it returns false.
func (t *Tree[T]) Ascend(yield func(T) bool) { ascend(t.root, yield) }

func ascend[T any](n *treeNode[T], yield func(T) bool) bool {
	return n == nil || ascend(n.left, yield) && yield(n.item) && ascend(n.right, yield)
}
