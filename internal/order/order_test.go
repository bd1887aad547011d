package order_test

import (
	"slices"
	"testing"
	"time"

	"capstan.dev/capstan/internal/order"
)

func TestTrueFirst(t *testing.T) {
	got := []bool{false, true, false, true}
	slices.SortFunc(got, order.TrueFirst)
	if want := []bool{true, true, false, false}; !slices.Equal(got, want) {
		t.Errorf("sorted: %v, want %v", got, want)
	}
}

func TestSooner(t *testing.T) {
	for _, c := range []struct{ a, b, want time.Duration }{{0, 0, 0}, {0, 2, 2}, {1, 0, 1}, {1, 2, 1}, {2, 1, 1}, {-1, 2, 2}, {2, -1, 2}, {-1, -2, 0}} {
		if got := order.Sooner(c.a, c.b); got != c.want {
			t.Errorf("Sooner(%d, %d) = %d, want %d", c.a, c.b, got, c.want)
		}
	}
}
