//go:build e2e

package main

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"
)

func stepsOf(seed uint64, n int) (out []step) {
	s := newSchedule(seed)
	for range n {
		out = append(out, s.next())
	}
	return out
}

func TestSeedDeterminesSteps(t *testing.T) {
	for seed := range uint64(20) {
		if a, b := stepsOf(seed, 200), stepsOf(seed, 200); !reflect.DeepEqual(a, b) {
			t.Fatalf("seed %d has two sequences", seed)
		}
	}
	if reflect.DeepEqual(stepsOf(1, 20), stepsOf(2, 20)) {
		t.Error("seeds 1 and 2 have the same sequence")
	}
}

// For any seed, the host never gets more work than it can run, and each operation and fault is about an existing
// cluster.
func TestScheduleStaysWithinItsLimits(t *testing.T) {
	for seed := range uint64(50) {
		s, exists := newSchedule(seed), map[string]bool{}
		for range 300 {
			st := s.next()
			op := st.Operation
			if op.Cluster != "" && exists[op.Cluster] == (op.Kind == createCluster) {
				t.Fatalf("seed %d, step %d: %v, clusters %v", seed, st.Number, op, exists)
			}
			switch op.Kind {
			case createCluster:
				exists[op.Cluster] = true
			case deleteCluster:
				delete(exists, op.Cluster)
			}
			if len(s.clusters) > maxClusters || s.controlPlanes() > maxControlPlanes || len(s.claims) > maxClaims {
				t.Fatalf("seed %d, step %d: %d clusters, %d control planes, %d claims", seed, st.Number, len(s.clusters), s.controlPlanes(), len(s.claims))
			}
			checkStep(t, st, s.clusters)
		}
	}
}

func checkStep(t *testing.T, st step, clusters []wantedCluster) {
	t.Helper()
	for _, c := range clusters {
		if c.Workers < 0 || c.Workers > maxWorkers || c.ControlPlanes != 1 && c.ControlPlanes != 3 {
			t.Fatalf("step %d wants %+v", st.Number, c)
		}
	}
	if len(st.Faults) < 1 || len(st.Faults) > maxFaults {
		t.Fatalf("step %d has %d faults", st.Number, len(st.Faults))
	}
	for _, f := range st.Faults {
		lasts := f.Kind == stopFault || f.Kind == cutFault
		if lasts != (f.For > 0) || f.For > 20*time.Second || f.After >= 10*time.Second {
			t.Fatalf("step %d has the fault %+v", st.Number, f)
		}
	}
}

// Each kind of operation and each fault occurs in a long run.
func TestAllOperationsAndFaultsOccur(t *testing.T) {
	operations, faults := map[operationKind]int{}, map[string]int{}
	for _, st := range stepsOf(1, 1000) {
		operations[st.Operation.Kind]++
		for _, f := range st.Faults {
			faults[fmt.Sprint(f.Kind, " ", f.Target)]++
		}
	}
	for _, kind := range []operationKind{
		createCluster, deleteCluster, scaleWorkers, scaleControlPlane, rolloutWorkers, rolloutControl, createClaims, deleteClaims, deleteMachineOfSet,
	} {
		if operations[kind] == 0 {
			t.Errorf("%q never occurs: %v", kind, operations)
		}
	}
	if len(faults) != len(weightedFaults) {
		t.Errorf("%d of %d faults occur: %v", len(faults), len(weightedFaults), faults)
	}
}

func TestPick(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 0))
	counts := map[string]int{}
	for range 10_000 {
		counts[pick(random, []choice[string]{{1, "rare"}, {9, "often"}})]++
	}
	if counts["rare"] < 800 || counts["rare"] > 1200 || counts["rare"]+counts["often"] != 10_000 {
		t.Errorf("weights 1 and 9 of 10 000: %v", counts)
	}
}
