package ledger

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// Resting addresses are recorded in status, which clusterctl does not move (ALL-12). An annotation has a copy. It follows the
// record after some time, so that a release costs no further write. Until then the pool has clusterctl's
// annotation block-move, which is written before the record: a move waits for the copy, whatever process ends meanwhile.

// maxAnnotation bounds the copy, in bytes. The API server accepts 256 KiB of annotations.
const maxAnnotation = 200_000

// SavePeriod is the time after which the copy follows the record, for a pool's resting period.
func SavePeriod(rest time.Duration) time.Duration { return max(rest/restBuckets, time.Second) }

// resting are the addresses that still rest, as the annotation has them.
func resting(pool ipamv1.Pool, now time.Time) []ipamv1.RestingAddresses {
	record := pool.PoolStatus().Allocator
	if record == nil {
		return nil
	}
	out := slices.DeleteFunc(slices.Clone(record.Resting), func(r ipamv1.RestingAddresses) bool { return !r.Until.After(now) })
	size := 0
	for i, r := range slices.Backward(out) {
		if size += len(r.Offsets) + 64; size > maxAnnotation {
			return out[i+1:]
		}
	}
	return out
}

// saved are the addresses of the annotation that still rest at a time; none if it cannot be read.
func saved(pool ipamv1.Pool, now time.Time) []ipamv1.RestingAddresses {
	var out []ipamv1.RestingAddresses
	if json.Unmarshal([]byte(pool.GetAnnotations()[ipamv1.RestingAnnotation]), &out) != nil {
		return nil
	}
	return slices.DeleteFunc(out, func(r ipamv1.RestingAddresses) bool { return !r.Until.After(now) })
}

// Saved is true if a move of the pool at this time would lose no rest.
func Saved(pool ipamv1.Pool, now time.Time) bool {
	return slices.EqualFunc(resting(pool, now), saved(pool, now), func(a, b ipamv1.RestingAddresses) bool {
		return a.Offsets == b.Offsets && a.Until.Equal(&b.Until)
	})
}

// BlocksMove is true if the pool has our block-move annotation.
func BlocksMove(pool ipamv1.Pool) bool {
	return pool.GetAnnotations()[clusterctlv1.BlockMoveAnnotation] == ipamv1.RestingBlocksMove
}

// SavedAnnotations are the changes of a pool's annotations that bring the copy up to date and let a move go on, for a merge patch.
func SavedAnnotations(pool ipamv1.Pool, now time.Time) (map[string]any, error) {
	out := map[string]any{ipamv1.RestingAnnotation: nil}
	if rests := resting(pool, now); len(rests) > 0 {
		raw, err := json.Marshal(rests)
		if err != nil {
			return nil, err
		}
		out[ipamv1.RestingAnnotation] = string(raw)
	}
	if BlocksMove(pool) {
		out[clusterctlv1.BlockMoveAnnotation] = nil
	}
	return out, nil
}

// blockMove makes clusterctl wait if the status that doc is about to get has rests that its annotation lacks. A block-move of
// others has the same effect.
func (p *Pool) blockMove(ctx context.Context, doc ipamv1.Pool) error {
	if _, blocked := doc.GetAnnotations()[clusterctlv1.BlockMoveAnnotation]; blocked || Saved(doc, p.now()) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	raw, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": doc.GetUID(), "resourceVersion": doc.GetResourceVersion(),
		"annotations": map[string]any{clusterctlv1.BlockMoveAnnotation: ipamv1.RestingBlocksMove},
	}})
	if err != nil {
		return err
	}
	patched := NewObject(p.key.Kind)
	patched.SetNamespace(doc.GetNamespace())
	patched.SetName(doc.GetName())
	if err := p.reg.client.Patch(ctx, patched, client.RawPatch(types.MergePatchType, raw)); err != nil {
		return fmt.Errorf("holding back clusterctl move of %s: %w", p.key, err)
	}
	doc.SetAnnotations(patched.GetAnnotations())
	doc.SetResourceVersion(patched.GetResourceVersion())
	return nil
}

// moved are the rests that a pool has brought along from another management cluster: none is longer than the pool's own period.
func moved(pool ipamv1.Pool, now time.Time) []ipamv1.RestingAddresses {
	seconds := pool.PoolSpec().RestSeconds
	if seconds == nil {
		return nil
	}
	longest := metav1.NewTime(restUntil(now, time.Duration(*seconds)*time.Second))
	out := saved(pool, now)
	for i := range out {
		if longest.Before(&out[i].Until) {
			out[i].Until = longest
		}
	}
	return out
}
