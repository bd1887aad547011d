package order_test

import (
	"slices"
	"testing"

	"capstan.dev/capstan/internal/order"
)

func TestTrueFirst(t *testing.T) {
	got := []bool{false, true, false, true}
	slices.SortFunc(got, order.TrueFirst)
	if want := []bool{true, true, false, false}; !slices.Equal(got, want) {
		t.Errorf("sorted: %v, want %v", got, want)
	}
}
