package model

import (
	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/stored"
)

// ConfigPlan says which CapstanConfig the next Machine gets.
type ConfigPlan struct {
	// Use is a CapstanConfig without a Machine, left by an attempt that did not end; nil when a new one is needed.
	Use *bootstrapv1.CapstanConfig
	// Name of the CapstanConfig, and of the Machine.
	Name string
	// Remove are the other CapstanConfigs without a Machine. They go before a new one is created.
	Remove []*bootstrapv1.CapstanConfig
}

// ChooseConfig chooses among the CapstanConfigs without a Machine the first one with the wanted spec, or else a new one with the given name.
// If the name is reserved, the Machine can have no other one.
func ChooseConfig(unfinished []*bootstrapv1.CapstanConfig, wanted bootstrapv1.CapstanConfigSpec, name string, reserved bool) ConfigPlan {
	plan := ConfigPlan{Name: name}
	for _, config := range unfinished {
		if plan.Use == nil && (!reserved || config.Name == name) && stored.Equal(config.Spec, wanted) {
			plan.Use, plan.Name = config, config.Name
		} else {
			plan.Remove = append(plan.Remove, config)
		}
	}
	return plan
}
