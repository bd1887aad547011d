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

// Resting addresses are recorded in status, which clusterctl does not move (ALL-12). An annotation contains a copy. The
// copy is written some time after the record, so that a release needs no additional write. Until then the pool has
// clusterctl's annotation block-move, so that a move waits for the copy. The annotation is written before the record, so
// that a crash between the two writes is safe.

// maxAnnotation bounds the copy, in bytes. The API server accepts 256 KiB of annotations.
const maxAnnotation = 200_000

// SavePeriod is the time after which the copy follows the record, for a pool's resting period.
func SavePeriod(rest time.Duration) time.Duration { return max(rest/restBuckets, time.Second) }

// resting returns the addresses of the record that still rest, at most as many as the annotation can contain.
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

// saved returns the addresses of the annotation that still rest. It returns none if the annotation is invalid.
func saved(pool ipamv1.Pool, now time.Time) []ipamv1.RestingAddresses {
	var out []ipamv1.RestingAddresses
	if json.Unmarshal([]byte(pool.GetAnnotations()[ipamv1.RestingAnnotation]), &out) != nil {
		return nil
	}
	return slices.DeleteFunc(out, func(r ipamv1.RestingAddresses) bool { return !r.Until.After(now) })
}

// Saved reports whether the annotation contains all resting addresses of the record.
func Saved(pool ipamv1.Pool, now time.Time) bool {
	return slices.EqualFunc(resting(pool, now), saved(pool, now), func(a, b ipamv1.RestingAddresses) bool {
		return a.Offsets == b.Offsets && a.Until.Equal(&b.Until)
	})
}

// BlocksMove reports whether the pool has our block-move annotation.
func BlocksMove(pool ipamv1.Pool) bool {
	return pool.GetAnnotations()[clusterctlv1.BlockMoveAnnotation] == ipamv1.RestingBlocksMove
}

// SavedAnnotations returns the annotations of a merge patch that updates the copy and removes our block-move annotation.
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

// blockMove adds the block-move annotation if the new status in doc has resting addresses that the copy lacks. A
// block-move annotation of another component has the same effect.
func (w *recordWriter) blockMove(ctx context.Context, doc ipamv1.Pool) error {
	if _, blocked := doc.GetAnnotations()[clusterctlv1.BlockMoveAnnotation]; blocked || Saved(doc, w.state.now()) {
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
	patched := NewObject(w.key.Kind)
	patched.SetNamespace(doc.GetNamespace())
	patched.SetName(doc.GetName())
	if err := w.client.Patch(ctx, patched, client.RawPatch(types.MergePatchType, raw)); err != nil {
		return fmt.Errorf("holding back clusterctl move of %s: %w", w.key, err)
	}
	doc.SetAnnotations(patched.GetAnnotations())
	doc.SetResourceVersion(patched.GetResourceVersion())
	return nil
}

// moved returns the resting addresses of a pool from another management cluster. Their periods are limited to that of the
// pool.
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
