package etcd

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

// leases notes the times of renewals. Each second one fails.
type leases struct {
	Objects
	asked   int
	renewed []time.Time
}

func (l *leases) RenewLease(_ context.Context, _ string, now time.Time) error {
	if l.asked++; l.asked%2 == 1 {
		return errors.New("no answer")
	}
	l.renewed = append(l.renewed, now)
	return nil
}

// The Lease does not expire during the defragmentation of a large file, unless the states of the other members are unknown.
func TestLeaseDuringDefragmentation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		objects, result, begun := &leases{}, errors.New("too slow"), time.Now()
		care := &Care{Objects: objects, Log: slog.New(slog.DiscardHandler), renewed: begun}
		var confirmed error
		confirm := func(context.Context) error { return confirmed }
		defragment := func() error {
			time.Sleep(defragTimeout)
			return result
		}
		err := care.renewWhile(t.Context(), confirm, defragment)
		if !errors.Is(err, result) {
			t.Errorf("the result is %v", err)
		}
		last := begun
		for _, at := range append(objects.renewed, time.Now()) {
			if at.Sub(last) >= etcdv1.CareLeaseDuration {
				t.Errorf("the Lease was not renewed between %s and %s of the defragmentation", last.Sub(begun), at.Sub(begun))
			}
			last = at
		}
		asked := objects.asked
		confirmed = errors.New("another member leads")
		if err := care.renewWhile(t.Context(), confirm, defragment); !errors.Is(err, result) || objects.asked != asked {
			t.Errorf("the Lease was renewed for states that nobody has confirmed; the result is %v", err)
		}
	})
}
