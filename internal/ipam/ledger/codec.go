package ledger

import (
	"cmp"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/alloc"
)

// maxResting bounds the record: 100 000 addresses of the largest spread that IPv4 allows take some 400 kB, well below
// etcd's limit. Above it, the addresses that have rested longest are freed.
const maxResting = 100_000

// restBuckets is the number of different end times within a resting period. Addresses with the same end time are encoded
// together.
const restBuckets = 16

// restUntil returns the time at which an address that is released now becomes free. It is rounded up to an end time that
// other addresses share.
func restUntil(now time.Time, rest time.Duration) time.Time {
	step := max(rest/restBuckets, time.Second)
	return now.Add(rest).Add(step - 1).Truncate(step)
}

// encodeResting encodes the resting addresses. It omits the oldest ones above maxResting.
func encodeResting(set *alloc.Set) []ipamv1.RestingAddresses {
	byTime := map[time.Time][]alloc.U128{}
	set.EachResting(func(a alloc.U128, until time.Time) {
		t := until.UTC().Truncate(time.Second)
		if t.Before(until) {
			t = t.Add(time.Second)
		}
		byTime[t] = append(byTime[t], a)
	})
	out := make([]ipamv1.RestingAddresses, 0, len(byTime))
	for until, addresses := range byTime {
		slices.SortFunc(addresses, alloc.U128.Cmp)
		out = append(out, ipamv1.RestingAddresses{Until: metav1.NewTime(until), Offsets: encodeOffsets(addresses)})
	}
	slices.SortFunc(out, func(a, b ipamv1.RestingAddresses) int { return a.Until.Compare(b.Until.Time) })
	total := set.Resting()
	for total > maxResting && len(out) > 1 {
		total -= len(byTime[out[0].Until.UTC()])
		out = out[1:]
	}
	return out
}

// encodeOffsets encodes the distances of sorted addresses, each as two varints. The high varint is nearly always the
// single byte 0.
func encodeOffsets(sorted []alloc.U128) string {
	var raw []byte
	var last alloc.U128
	for _, a := range sorted {
		d := a.Sub(last)
		raw = binary.AppendUvarint(raw, d.Lo)
		raw = binary.AppendUvarint(raw, d.Hi)
		last = a
	}
	return base64.RawStdEncoding.EncodeToString(raw)
}

// decodeOffsets is the inverse of encodeOffsets.
func decodeOffsets(s string) ([]alloc.U128, error) {
	raw, err := base64.RawStdEncoding.DecodeString(s)
	if err != nil {
		return nil, fmt.Errorf("resting addresses are not base64: %w", err)
	}
	var out []alloc.U128
	var last alloc.U128
	for len(raw) > 0 {
		lo, n := binary.Uvarint(raw)
		if n <= 0 {
			return nil, fmt.Errorf("resting addresses are cut off after %d", len(out))
		}
		hi, m := binary.Uvarint(raw[n:])
		if m <= 0 {
			return nil, fmt.Errorf("resting addresses are cut off after %d", len(out))
		}
		raw = raw[n+m:]
		last = last.Add(alloc.U128{Hi: hi, Lo: lo})
		out = append(out, last)
	}
	return out, nil
}

// encodePending encodes the pending allocations, sorted by the UID of their claims.
func encodePending(plan *alloc.Plan, pending []*pendingEntry) []ipamv1.PendingAllocation {
	out := make([]ipamv1.PendingAllocation, 0, len(pending))
	for _, e := range pending {
		out = append(out, ipamv1.PendingAllocation{
			Address:   e.span.First.Addr(plan.V6).String(),
			Namespace: e.claim.Namespace,
			Name:      e.claim.Name,
			UID:       string(e.uid),
			Until:     metav1.NewTime(e.until.UTC().Truncate(time.Second).Add(time.Second)),
		})
	}
	slices.SortFunc(out, func(a, b ipamv1.PendingAllocation) int { return cmp.Compare(a.UID, b.UID) })
	return out
}
